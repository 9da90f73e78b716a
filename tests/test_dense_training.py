"""Scores of detections, and the example that trains a detector."""
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from flatten_zoo.dense import LEVELS, CocoInstances, CocoScores, coco_split, mask_rcnn, write_shapes
from flatten_zoo.errors import UsageError

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / 'examples' / 'train_detection.py'


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('shapes') / 'data'
    write_shapes(folder, 12, 64)
    return CocoInstances(folder)


def perfect(target):
    return {
        'boxes': target['boxes'].as_subclass(torch.Tensor), 'labels': target['labels'],
        'scores': torch.ones(len(target['labels'])), 'masks': target['masks'][:, None].float()}


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
    shift = score(data, lambda found: {**found, 'boxes': torch.stack([
        x + (found['boxes'][:, 2] - found['boxes'][:, 0]) / 4 * (i % 2 == 0)
        for i, x in enumerate(found['boxes'].unbind(1))], dim=1)})
    assert shift['box AP50'] == pytest.approx(1) and shift['box AP75'] == 0
    assert shift['mask AP75'] == pytest.approx(1)
    nothing = score(data, lambda found: {key: x[:0] for key, x in found.items()})
    assert set(nothing.values()) == {0}


def test_scores_are_of_the_images_added(data):
    scores = CocoScores(data)
    target = data[0][1]
    scores.add([target['image_id']], [perfect(target)])
    assert scores.compute()['mask AP'] == pytest.approx(1)


def run_example(*arguments):
    return runpy.run_path(str(SCRIPT))['main']([str(argument) for argument in arguments])


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
        *TINY, '--data', tmp_path / 'data', '--boxes-only', '--attention', 'issa', '--levels', 'fpn4', '--backbone',
        'resnet18', '--output', tmp_path / 'out')
    assert set(scores) == {'box AP', 'box AP50', 'box AP75'}
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {'last.pth', 'predictions.png'}


@pytest.mark.parametrize('arguments, message', [
    (['--epochs', 0], '--epochs must be positive, got 0'),
    (['--batch-size', 5], '--batch-size 5 is more than the 4 training images'),
    (['--data', 'nowhere'], "there is no folder 'nowhere'"),
    (['--backbone', 'flatten_pvt_v2_b9'], "unknown model 'flatten_pvt_v2_b9'"),
    (['--backbone', 'flatten_deit_t'], 'with --backbone flatten_deit_t: a feature pyramid needs'),
    (['--workers', -1], '--workers must not be negative, got -1'),
    (['--lr', 0], '--lr must be positive, got 0'),
    (['--device', 'abacus'], '--device abacus: '),
    (['--lr', 1e20, '--epochs', 2], 'try a lower --lr'),
])
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


def test_example_says_mistakes_in_one_line(tmp_path):
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        [sys.executable, SCRIPT, '--data', 'nowhere', '--output', tmp_path], env=environment, capture_output=True,
        text=True)
    assert done.returncode == 2 and done.stderr == "error: there is no folder 'nowhere' (--data)\n"


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
    subprocess.run([
        sys.executable, SCRIPT, '--backbone', 'flatten_pvt_v2_b0', '--attention', 'ea', '--levels', *LEVELS,
        '--output', tmp_path], env=environment, check=True)
    scores = torch.load(tmp_path / 'last.pth')['scores']
    assert scores['box AP50'] >= 0.5 and scores['mask AP50'] >= 0.4
