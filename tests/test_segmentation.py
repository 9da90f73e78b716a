"""Loss and scores of segmentation, and the example that trains."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from flatten_zoo.cli import main
from flatten_zoo.dense import SegmentationScores, segmentation_losses
from flatten_zoo.dense.training.options import task_parser
from flatten_zoo.dense.training.segmentation import Network, Segmentation

from .marks import slow_but


def test_losses():
    torch.manual_seed(0)
    outputs = {'out': torch.randn(2, 4, 6, 7), 'aux': torch.randn(2, 4, 6, 7)}
    labels = torch.randint(4, (2, 6, 7))
    labels[0, 2] = 255
    expected = {name: F.cross_entropy(y, labels, ignore_index=255) for name, y in outputs.items()}
    losses = segmentation_losses(outputs, labels)
    assert losses.keys() == outputs.keys()
    torch.testing.assert_close(losses['out'], expected['out'])
    torch.testing.assert_close(losses['aux'], 0.4 * expected['aux'])
    losses = segmentation_losses(outputs, labels, aux_weight=0.5)
    torch.testing.assert_close(sum(losses.values()), expected['out'] + 0.5 * expected['aux'])  # torchvision's criterion
    assert list(segmentation_losses({'out': outputs['out']}, labels)) == ['out']

    ignored = segmentation_losses({'out': outputs['out'].requires_grad_()}, torch.full((2, 6, 7), 255))['out']
    ignored.backward()
    assert ignored == 0 and not outputs['out'].grad.any()


def test_scores():
    labels = torch.tensor([[[0, 0, 1, 1], [0, 1, 1, 255]]])
    found = torch.tensor([[[0, 1, 1, 1], [0, 0, 1, 2]]])
    scores = SegmentationScores(['background', 'thing', 'other'])
    scores.add(found, labels)
    result = scores.compute()
    assert result['IoU background'] == pytest.approx(2 / 4) and result['IoU thing'] == pytest.approx(3 / 5)
    assert math.isnan(result['IoU other'])  # found only where nothing counts
    assert result['accuracy background'] == pytest.approx(2 / 3) and result['accuracy thing'] == pytest.approx(3 / 4)
    assert math.isnan(result['accuracy other'])
    assert result['mean accuracy'] == pytest.approx((2 / 3 + 3 / 4) / 2)
    assert result['mIoU'] == pytest.approx((2 / 4 + 3 / 5) / 2) and result['accuracy'] == pytest.approx(5 / 7)

    # logits, and pixels of all images together
    scores.add(F.one_hot(torch.full((1, 2, 4), 2), 3).permute(0, 3, 1, 2).float(), torch.full((1, 2, 4), 2))
    assert scores.compute()['IoU other'] == 1 and scores.compute()['accuracy'] == pytest.approx(13 / 15)


def test_scores_are_those_of_sets_of_pixels():
    torch.manual_seed(0)
    scores, found, labels = (
        SegmentationScores(list('abc'), ignore_index=-1),
        torch.randint(3, (4, 9, 7)),
        torch.randint(-1, 3, (4, 9, 7)),
    )
    for i in range(4):
        scores.add(found[i : i + 1], labels[i : i + 1])
    parts = [SegmentationScores(list('abc'), ignore_index=-1) for _ in range(2)]  # of two processes
    for part, images in zip(parts, (slice(0, 1), slice(1, 4)), strict=True):
        part.add(found[images], labels[images])
    parts[0].merge(parts[1].state())
    assert parts[0].compute() == scores.compute()
    result, counted = scores.compute(), labels >= 0
    for i, name in enumerate('abc'):
        both, either = (found == i) & (labels == i), ((found == i) & counted) | (labels == i)
        assert result[f'IoU {name}'] == pytest.approx((both.sum() / either.sum()).item())


@pytest.mark.parametrize(
    'found, labels, message',
    [
        (torch.zeros(1, 4, 4, dtype=torch.long), torch.full((1, 4, 4), 3), r'labels must lie in \[0, 3\) or be 255'),
        (torch.zeros(1, 4, 4, dtype=torch.long), torch.zeros(1, 5, 4, dtype=torch.long), r'\(1, 4, 4\).*\(1, 5, 4\)'),
    ],
)
def test_scores_of_bad_labels(found, labels, message):
    with pytest.raises(ValueError, match=message):
        SegmentationScores(list('abc')).add(found, labels)


def test_scores_where_nothing_counts():
    scores = SegmentationScores(['a', 'b'])
    scores.add(torch.zeros(1, 2, 2, dtype=torch.long), torch.full((1, 2, 2), 255))
    assert all(math.isnan(value) for value in scores.compute().values())


def test_scores_of_two_processes_together():
    labels = torch.randint(3, (2, 8, 8))
    found = torch.randint(3, (2, 8, 8))
    whole, together = SegmentationScores(list('abc')), SegmentationScores(list('abc'))
    whole.add(found, labels)
    for i in range(2):
        part = SegmentationScores(list('abc'))
        part.add(found[i], labels[i])
        together.merge(part.state())
    assert together.compute() == whole.compute()


# Training


def train(*arguments) -> int:
    pytest.importorskip('segmentation_models_pytorch')
    return main(['train-dense', 'segmentation', '--device', 'cpu', *map(str, arguments)])


@pytest.mark.parametrize(
    'model, backbone',
    slow_but(
        ('isa_net', 'test_resnet'),
        of=[('upernet', 'flatten_pvt_v2_b0'), ('fpn', 'flatten_swin_t'), ('isa_net', 'test_resnet')],
    ),
)
def test_training(tmp_path, model, backbone):
    options = f'--model {model} --backbone {backbone} --shapes 8 --batch-size 4 --epochs 1 --image-size 32'.split()
    assert train(*options, '--output', tmp_path) == 0
    saved = torch.load(tmp_path / 'best.pth', weights_only=True)
    assert list(saved['scores'])[3:5] == ['mIoU', 'accuracy']
    assert 'IoU triangle' in saved['scores']
    assert saved['classes'] == ['background', 'circle', 'square', 'triangle']
    assert Image.open(tmp_path / 'predictions.png').size[0] > 3 * 192
    network(*options).load_state_dict(saved['model'])


def network(*options: str) -> Network:
    args = task_parser(Segmentation).parse_with_config([*options])
    return Network(args, args.backbone, 4, pretrained=False)


def test_training_on_layouts_by_name(tmp_path):
    """Pairs of files of other sizes than the network takes, windows and scales."""
    folder = tmp_path / 'data'
    for split, names in (('train', 'abcd'), ('val', 'e')):
        for name in names:
            for kind, pixels in (
                ('JPEGImages', np.full((40, 60, 3), 90, np.uint8)),
                ('SegmentationClass', np.full((40, 60), 20, np.uint8)),
            ):
                path = folder / kind / f'{name}.{"jpg" if pixels.ndim == 3 else "png"}'
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
        path = folder / 'ImageSets' / 'Segmentation' / f'{split}.txt'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('\n'.join(names))
    options = (
        f'--data {folder} --data-layout voc2012 --model fpn --backbone test_resnet --image-size 33 --crop-size 32 48 '
        '--scale 0.5 2 --distort-colours --window 20 24 --test-scales 0.5 1 --test-flip --batch-size 2 --epochs 1'
    )
    assert train(*options.split(), '--output', tmp_path / 'out') == 0
    saved = torch.load(tmp_path / 'out' / 'best.pth', weights_only=True)
    assert saved['classes'][20] == 'tvmonitor'
    assert 0 <= saved['scores']['mIoU'] <= 1


@pytest.mark.parametrize('backbone, mean', [('flatten_pvt_v2_b0', 0.485), ('mobilevit_xxs', 0.0)])
def test_images_are_normalised_as_the_backbone_wants_it(backbone, mean):
    pytest.importorskip('segmentation_models_pytorch')
    assert network('--backbone', backbone).normalize.mean[0] == mean


@pytest.mark.parametrize('model', ['fpn', 'isa_net'])
def test_networks_take_any_size(model):
    pytest.importorskip('segmentation_models_pytorch')
    outputs = network('--model', model, '--backbone', 'test_resnet').eval()(torch.rand(2, 3, 33, 45))
    assert {tuple(x.shape) for x in outputs.values()} == {(2, 4, 33, 45)}


@pytest.mark.parametrize(
    'arguments, message',
    [
        ('--backbone flatten_pvt_v2_b9', "unknown model 'flatten_pvt_v2_b9'; did you mean flatten_pvt_v2_b"),
        ('--backbone flatten_deit_t', 'cannot build upernet with --backbone flatten_deit_t'),
        ('--model isa_net --backbone pvt_v2_b0', 'choose a network that can be dilated'),
        ('--window-stride 8 8', '--window-stride needs --window'),
        ('--window 8 8 --window-stride 8 9', '--window-stride [8, 9] leaves pixels out between windows of [8, 8]'),
        ('--data . --data-layout voc', "unknown layout 'voc'; did you mean voc2012"),
    ],
)
def test_bad_arguments(tmp_path, capsys, arguments, message):
    assert train('--shapes', 16, '--output', tmp_path, *arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'last.pth').exists()


@pytest.mark.slow
@pytest.mark.parametrize('model', ['upernet', 'isa_net'])
def test_networks_learn(tmp_path, model):
    """From scratch, measured on other images than those of the training."""
    assert train('--model', model, '--output', tmp_path) == 0
    assert torch.load(tmp_path / 'best.pth', weights_only=True)['scores']['mIoU'] >= 0.75
