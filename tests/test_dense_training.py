"""Scores of detections, and the example that trains a detector."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.ops import MultiScaleRoIAlign

from flatten_zoo.dense import (
    LEVELS,
    CocoInstances,
    CocoScores,
    cascade_mask_rcnn,
    coco_split,
    mask_rcnn,
    retinanet,
    write_shapes,
)
from flatten_zoo.errors import UsageError
from tests.examples import load_example

mask = pytest.importorskip('pycocotools.mask')

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / 'examples' / 'train_detection.py'


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


def test_validation_sees_one_image_at_a_time(tmp_path):
    write_shapes(tmp_path / 'shapes', 3, 64)
    data = CocoInstances(tmp_path / 'shapes')

    class Model(torch.nn.Module):
        def forward(self, images):
            (image,) = images
            index = next(i for i in range(len(data)) if torch.equal(data[i][0], image))
            return [perfect(data[index][1])]

    scores = load_example('train_detection').evaluate(Model(), data, 'cpu')
    assert scores['mask AP'] == pytest.approx(1)


def run_example(*arguments):
    return load_example('train_detection').main([str(argument) for argument in arguments])


TINY = ['--image-size', 64, '--shapes', 4, '--batch-size', 2, '--epochs', 1, '--regions', 8]


def test_example(tmp_path, capsys):
    scores = run_example(*TINY, '--output', tmp_path)
    assert set(scores) == {f'{kind} {figure}' for kind in ('box', 'mask') for figure in ('AP', 'AP50', 'AP75')}
    out = capsys.readouterr().out
    assert 'epoch 1/1  loss ' in out and 'mask AP50' in out
    saved = torch.load(tmp_path / 'last.pth')
    assert saved['classes'] == ['background', 'circle', 'square', 'triangle'] and saved['scores'] == scores
    model = mask_rcnn('flatten_pvt_v2_b0', 4, 'ea')
    model.load_state_dict(saved['model'])
    learnt = [level for level, module in model.backbone.attention.items() if module.reprojection.weight.any()]
    assert set(learnt) >= {'fpn1', 'fpn2', 'fpn3'}, 'fpn5 is one position here, of which no anchor may be sampled'
    assert Image.open(tmp_path / 'predictions.png').mode == 'RGB'


def test_example_on_a_coco_folder_without_masks(tmp_path):
    for seed, split in enumerate(('train', 'val')):
        write_shapes(tmp_path / 'data' / split, 2, 64, seed)
    scores = run_example(
        *TINY,
        '--data',
        tmp_path / 'data',
        '--boxes-only',
        '--attention',
        'issa',
        '--levels',
        'fpn4',
        '--backbone',
        'resnet18',
        '--output',
        tmp_path / 'out',
    )
    assert set(scores) == {'box AP', 'box AP50', 'box AP75'}
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {'last.pth', 'predictions.png'}


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--epochs', 0], '--epochs must be positive, got 0'),
        (['--batch-size', 5], '--batch-size 5 is more than the 4 training images'),
        (['--data', 'nowhere'], "there is no folder 'nowhere'"),
        (['--backbone', 'flatten_pvt_v2_b9'], "unknown model 'flatten_pvt_v2_b9'"),
        (
            ['--backbone', 'vit_small_patch14_dinov2'],
            'with --backbone vit_small_patch14_dinov2: a feature pyramid needs',
        ),
        (['--workers', -1], '--workers must not be negative, got -1'),
        (['--lr', 0], '--lr must be positive, got 0'),
        (['--device', 'abacus'], '--device abacus: '),
        (['--lr', 1e20, '--epochs', 2], 'try a lower --lr'),
    ],
)
def test_bad_arguments_of_the_example(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        run_example(*TINY, '--output', tmp_path, *arguments)
    assert not (tmp_path / 'last.pth').exists()


def test_output_is_not_lost(tmp_path):
    (tmp_path / 'last.pth').touch()
    with pytest.raises(UsageError, match='holds a trained network already'):
        run_example('--output', tmp_path)
    with pytest.raises(UsageError, match='cannot write to'):
        run_example('--output', tmp_path / 'last.pth' / 'below')


def test_example_says_mistakes_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, 'argv', [str(SCRIPT), '--data', 'nowhere', '--output', str(tmp_path)])
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(SCRIPT), run_name='__main__')
    assert e.value.code == 2 and capsys.readouterr().err == "error: there is no folder 'nowhere' (--data)\n"


def test_unlike_categories(tmp_path):
    for split in ('train', 'val'):
        write_shapes(tmp_path / split, 2, 64)
    path = tmp_path / 'val' / 'instances.json'
    path.write_text(path.read_text().replace('"categories": [', '"categories": [{"id": 9, "name": "star"}, '))
    assert len(CocoInstances(**coco_split(tmp_path, 'val')).classes) == 5
    with pytest.raises(UsageError, match='do not have the same categories'):
        run_example(*TINY, '--data', tmp_path, '--output', tmp_path / 'out')


@pytest.mark.slow
def test_mask_rcnn_with_attention_learns(tmp_path):
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    subprocess.run(
        [
            sys.executable,
            SCRIPT,
            '--backbone',
            'flatten_pvt_v2_b0',
            '--attention',
            'ea',
            '--levels',
            *LEVELS,
            '--output',
            tmp_path,
        ],
        env=environment,
        check=True,
    )
    scores = torch.load(tmp_path / 'last.pth')['scores']
    assert scores['box AP50'] >= 0.5 and scores['mask AP50'] >= 0.4


def learn_shapes(build, folder, steps=300, batch_size=4, side=64, lr=1e-3):
    """Scores on held-out shapes of a network that learnt from scratch, with heads as cheap as they can be."""
    few = {
        'box_batch_size_per_image': 8,
        'rpn_post_nms_top_n_train': 32,
        'rpn_post_nms_top_n_test': 32,
        'mask_roi_pool': MultiScaleRoIAlign(['0', '1', '2', '3'], output_size=7, sampling_ratio=2),
    }
    write_shapes(folder / 'train', 400, side, seed=0)
    write_shapes(folder / 'val', 100, side, seed=1)
    train, val = CocoInstances(folder / 'train'), CocoInstances(folder / 'val')
    torch.manual_seed(0)
    arguments = {} if build is retinanet else few
    model = build('flatten_pvt_v2_b0', 4, 'ea', min_size=side, max_size=side, **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        images, targets = zip(*(train[i] for i in torch.randperm(len(train))[:batch_size].tolist()), strict=True)
        optimizer.zero_grad()
        sum(model(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimizer.step()
        schedule.step()
    scores = CocoScores(val)
    model.eval()
    with torch.inference_mode():
        for image, target in (val[i] for i in range(len(val))):
            scores.add([target['image_id']], model([image]))
    return scores.compute()


@pytest.mark.slow
@pytest.mark.parametrize('build', [cascade_mask_rcnn, retinanet])
def test_others_learn(build, tmp_path):
    assert learn_shapes(build, tmp_path)['box AP50'] >= 0.3
