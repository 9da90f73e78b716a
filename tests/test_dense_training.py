"""Scores of detections, and training a detector."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from flatten_zoo.cli import main
from flatten_zoo.dense import CocoInstances, CocoScores, mask_rcnn, write_shapes

mask = pytest.importorskip('pycocotools.mask')

pytest.importorskip('accelerate')
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('shapes') / 'data'
    write_shapes(folder, 12, 64)
    return CocoInstances(folder)


def perfect(target):
    return {
        'boxes': target['boxes'].as_subclass(torch.Tensor),
        'labels': target['labels'],
        'scores': torch.ones(len(target['labels'])),
        'masks': target['masks'][:, None].float(),
    }


def score(data, change):
    scores = CocoScores(data)
    for i in range(len(data)):
        target = data[i][1]
        scores.add([target['image_id']], [change(perfect(target))])
    return scores.compute()


def test_scores_of_perfect_detections(data):
    figures = ['AP', 'AP50', 'AP75']
    scores = score(data, lambda found: found)
    assert scores == {f'{kind} {figure}': pytest.approx(1) for kind in ('box', 'mask') for figure in figures}
    del_masks = score(data, lambda found: {key: x for key, x in found.items() if key != 'masks'})
    assert del_masks == {f'box {figure}': pytest.approx(1) for figure in figures}


def test_scores_of_worse_detections(data):
    wrong = score(data, lambda found: {**found, 'labels': found['labels'] % 3 + 1})
    assert wrong['box AP50'] < 0.3 and wrong['mask AP50'] < 0.3
    # a quarter of the width aside: an overlap of 60 %
    shift = score(
        data,
        lambda found: {
            **found,
            'boxes': torch.stack(
                [
                    x + (found['boxes'][:, 2] - found['boxes'][:, 0]) / 4 * (i % 2 == 0)
                    for i, x in enumerate(found['boxes'].unbind(1))
                ],
                dim=1,
            ),
        },
    )
    assert shift['box AP50'] == pytest.approx(1) and shift['box AP75'] == 0
    assert shift['mask AP75'] == pytest.approx(1)
    nothing = score(data, lambda found: {key: x[:0] for key, x in found.items()})
    assert set(nothing.values()) == {0}


def test_scores_are_of_the_images_added(data):
    scores = CocoScores(data)
    target = data[0][1]
    scores.add([target['image_id']], [perfect(target)])
    assert scores.compute()['mask AP'] == pytest.approx(1)


def test_reading_and_scoring_twice_gives_the_same(tmp_path):
    """One shape in every notation, and a crowd, whose ids begin with 0, which pycocotools takes for no match."""
    polygon = [[10, 10, 31, 10, 31, 43, 10, 43]]
    compressed = mask.merge(mask.frPyObjects(polygon, 60, 80))
    pixels = mask.decode(compressed).flatten('F')
    bounds = [0, *(pixels[1:] != pixels[:-1]).nonzero()[0] + 1, len(pixels)]
    counts = [int(b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    as_text = compressed['counts'].decode()
    notations = [polygon, {'size': [60, 80], 'counts': counts}, {'size': [60, 80], 'counts': as_text}]
    (tmp_path / 'images').mkdir()
    annotations = []
    for i, segmentation in enumerate(notations):
        Image.new('L', (80, 60)).save(tmp_path / 'images' / f'{i}.png')
        annotations.append(
            {'id': i, 'image_id': i, 'category_id': 1, 'bbox': [10, 10, 21, 33], 'segmentation': segmentation}
        )
    annotations.append(
        {
            'id': 3,
            'image_id': 0,
            'category_id': 1,
            'bbox': [50, 0, 30, 60],
            'iscrowd': 1,
            'segmentation': {'size': [60, 80], 'counts': [3000, 1800]},
        }
    )
    images = [{'id': i, 'file_name': f'{i}.png', 'height': 60, 'width': 80} for i in range(len(notations))]
    content = {'images': images, 'annotations': annotations, 'categories': [{'id': 1, 'name': 'thing'}]}
    (tmp_path / 'instances.json').write_text(json.dumps(content))
    data = CocoInstances(tmp_path)
    before = json.dumps(data.coco.dataset)

    def read():
        return [data.read(i)[1] for i in range(len(data))] + [data[i][1] for i in range(len(data))]

    first = read()
    expected = torch.from_numpy(mask.decode(compressed))
    assert expected.sum() == 21 * 33
    assert all(torch.equal(target['masks'][0], expected) for target in first)
    scores = CocoScores(data)
    for i in range(len(data)):
        found = perfect(data.read(i)[1])
        scores.add([i], [found])
    figures = scores.compute()
    assert figures == {name: pytest.approx(1) for name in figures} and 'mask AP' in figures
    for _ in range(2):
        for target, again in zip(first, read(), strict=True):
            torch.testing.assert_close(again['masks'], target['masks'])
        assert score(data, lambda found: found) == scores.compute() == figures
    assert json.dumps(data.coco.dataset) == before

    data.coco.anns[2]['segmentation'] = compressed  # counts in bytes, as pycocotools leaves them
    torch.testing.assert_close(data[2][1]['masks'][0].as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize('order', [(0, 1), (1, 0)])
def test_scores_of_two_processes_together(data, order):
    """Detections, half of them wrong, that were added in parts, in whatever order."""

    def change(i, found):
        return found if i % 3 else {**found, 'labels': found['labels'] % 3 + 1}

    whole, parts = CocoScores(data), [CocoScores(data), CocoScores(data)]
    for i in range(len(data)):
        target = data[i][1]
        for scores in (whole, parts[i % 2]):
            scores.add([target['image_id']], [change(i, perfect(target))])
    together = CocoScores(data)
    for part in order:
        together.merge(parts[part].state())
    assert together.compute() == whole.compute()
    assert 0 < whole.compute()['mask AP'] < 1


def train(*arguments) -> int:
    return main(['train-dense', 'detection', *map(str, arguments)])


TINY = shlex.split('--image-size 64 --shapes 4 --batch-size 2 --epochs 1 --regions 8 --device cpu')


def test_training(tmp_path, capsys):
    assert train(*TINY, '--output', tmp_path) == 0
    saved = torch.load(tmp_path / 'best.pth', weights_only=True)
    assert saved['classes'] == ['background', 'circle', 'square', 'triangle']
    figures = {f'{kind} {figure}' for kind in ('box', 'mask') for figure in ('AP', 'AP50', 'AP75')}
    assert set(saved['scores']) == {'update', 'lr', 'train_loss', *figures}
    model = mask_rcnn('flatten_pvt_v2_b0', 4, 'ea')
    model.load_state_dict(saved['model'])
    learnt = [level for level, module in model.backbone.attention.items() if module.reprojection.weight.any()]
    assert set(learnt) >= {'fpn1', 'fpn2', 'fpn3'}, 'fpn5 is one position here, of which no anchor may be sampled'
    assert Image.open(tmp_path / 'predictions.png').mode == 'RGB'
    # a validation of the run on other data
    write_shapes(tmp_path / 'data' / 'val', 2, 64, seed=7)
    capsys.readouterr()
    assert main(['validate-dense', str(tmp_path), '--data', str(tmp_path / 'data'), '--device', 'cpu']) == 0
    assert set(json.loads(capsys.readouterr().out)) == figures


@pytest.mark.parametrize('model', ['faster_rcnn', 'retinanet'])
def test_training_on_a_coco_folder_without_masks(tmp_path, model):
    for seed, split in enumerate(('train', 'val')):
        write_shapes(tmp_path / 'data' / split, 2, 64, seed)
    options = f'--model {model} --attention issa --levels fpn4 --backbone test_resnet'
    assert train(*TINY, *options.split(), '--data', tmp_path / 'data', '--output', tmp_path / 'out') == 0
    assert set(torch.load(tmp_path / 'out' / 'last.pth')['rows'][0]) >= {'box AP', 'box AP50', 'box AP75'}
    written = {'.lock', 'args.yaml', 'best.pth', 'last.pth', 'summary.csv', 'curves.png', 'predictions.png'}
    assert {p.name for p in (tmp_path / 'out').iterdir()} == written


@pytest.mark.slow
@pytest.mark.parametrize(
    'options, expected',
    [
        ('--model mask_rcnn', {'box AP50': 0.5, 'mask AP50': 0.4}),
        ('--model cascade_mask_rcnn', {'box AP50': 0.4, 'mask AP50': 0.3}),
        ('--model retinanet --epochs 8', {'box AP50': 0.3}),
    ],
)
def test_learns_with_attention(tmp_path, options, expected):
    script = ROOT / 'examples' / 'train_detection.py'
    subprocess.run(
        [sys.executable, script, *options.split(), '--output', tmp_path],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        check=True,
    )
    scores = torch.load(tmp_path / 'best.pth', weights_only=True)['scores']
    assert all(scores[figure] >= least for figure, least in expected.items()), scores
