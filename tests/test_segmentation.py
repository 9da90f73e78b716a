"""Loss and scores of segmentation, and the example that trains."""

import math

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from flatten_zoo.dense import CocoSemantic, SegmentationScores, segmentation_losses, write_shapes
from flatten_zoo.errors import UsageError
from tests.examples import load_example


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


@pytest.fixture(scope='module')
def example():
    pytest.importorskip('segmentation_models_pytorch')
    return load_example('train_segmentation')


@pytest.mark.parametrize(
    'model, backbone',
    [('upernet', 'flatten_pvt_v2_b0'), ('fpn', 'test_resnet'), ('fpn', 'flatten_swin_t'), ('isa_net', 'test_resnet')],
)
def test_example(example, tmp_path, capsys, model, backbone):
    arguments = ['--model', model, '--backbone', backbone, '--shapes', '8', '--batch-size', '4', '--epochs', '1']
    scores = example.main([*arguments, '--device', 'cpu', '--output', str(tmp_path)])
    assert list(scores)[:2] == ['mIoU', 'accuracy'] and 'IoU triangle' in scores
    assert 'epoch 1/1' in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ['last.pth', 'predictions.png', 'shapes-64-8']
    assert Image.open(tmp_path / 'predictions.png').size[0] > 3 * 64

    saved = torch.load(tmp_path / 'last.pth', weights_only=True)
    assert saved['classes'] == ['background', 'circle', 'square', 'triangle']
    args = example.parse_args(arguments)
    example.build_network(args, 4).model.load_state_dict(saved['model'])


def test_example_on_a_folder_of_images_of_other_sizes(example, tmp_path):
    write_shapes(tmp_path / 'data' / 'train', 4, (80, 120), seed=0)
    write_shapes(tmp_path / 'data' / 'val', 2, (100, 70), seed=1)
    scores = example.main(
        [
            '--data',
            str(tmp_path / 'data'),
            '--model',
            'fpn',
            '--backbone',
            'test_resnet',
            '--image-size',
            '48',
            '--batch-size',
            '2',
            '--epochs',
            '1',
            '--device',
            'cpu',
            '--output',
            str(tmp_path / 'out'),
        ]
    )
    assert 0 <= scores['mIoU'] <= 1


@pytest.mark.parametrize('backbone, mean', [('flatten_pvt_v2_b0', 0.485), ('mobilevit_xxs', 0.0)])
def test_images_are_normalised_as_the_backbone_wants_it(example, backbone, mean):
    network = example.build_network(example.parse_args(['--backbone', backbone, '--device', 'cpu']), 4)
    assert network.normalize.mean[0] == mean


def test_validation_sees_one_image_at_a_time(example, tmp_path):
    write_shapes(tmp_path / 'shapes', 3, (33, 40))
    sizes = []

    class Network(torch.nn.Module):
        def forward(self, images):
            sizes.append(tuple(images.shape))
            return {'out': images.new_zeros(len(images), 4, *images.shape[2:])}

    example.evaluate(Network(), CocoSemantic(tmp_path / 'shapes'), 'cpu')
    assert sizes == 3 * [(1, 3, 64, 64)]


def test_batches_are_padded(example):
    sizes = [(33, 20), (8, 40)]
    images, labels = example.collate([(torch.ones(3, *size), torch.ones(size, dtype=torch.long)) for size in sizes])
    assert images.shape == (2, 3, 64, 64) and labels.shape == (2, 64, 64)
    assert images.sum() == 3 * labels[labels != 255].numel() == 3 * (33 * 20 + 8 * 40)
    assert labels[0, :33, :20].eq(1).all() and images[1, :, :8, :40].eq(1).all()


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--data', 'nowhere'], "there is no folder 'nowhere'"),
        (['--batch-size', '0'], '--batch-size must be positive, got 0'),
        (['--workers', '-1'], '--workers must not be negative, got -1'),
        (['--device', 'abacus'], '--device abacus: '),
        (['--lr', '1e20'], 'the loss is nan: try a lower --lr'),
        (['--shapes', '4'], '--batch-size 16 is more than the 4 training images'),
        (['--backbone', 'flatten_pvt_v2_b9'], "unknown model 'flatten_pvt_v2_b9'; did you mean flatten_pvt_v2_b"),
        (['--backbone', 'flatten_deit_t'], 'cannot build upernet with --backbone flatten_deit_t'),
        (['--model', 'isa_net', '--backbone', 'pvt_v2_b0'], 'choose a network that can be dilated'),
    ],
)
def test_example_with_bad_arguments(example, tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        example.main(['--shapes', '16', '--output', str(tmp_path), *arguments])
    assert not (tmp_path / 'last.pth').exists()


def test_example_overwrites_no_trained_network(example, tmp_path):
    (tmp_path / 'last.pth').touch()
    with pytest.raises(UsageError, match='holds a trained network already'):
        example.main(['--output', str(tmp_path)])
    with pytest.raises(UsageError, match='cannot write to .*last.pth/below'):
        example.main(['--output', str(tmp_path / 'last.pth' / 'below')])


@pytest.mark.slow
@pytest.mark.parametrize('model', ['upernet', 'isa_net'])
def test_networks_learn(example, tmp_path, model):
    """From scratch, measured on other images than those of the training."""
    scores = example.main(['--model', model, '--device', 'cpu', '--output', str(tmp_path)])
    assert scores['mIoU'] >= 0.75
