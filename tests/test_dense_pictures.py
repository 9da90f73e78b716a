"""Pictures of detections and of label maps."""

import itertools

import pytest
import torch

from flatten_zoo.dense import colour_of, draw_detections, draw_labels, draw_legend

CLASSES = ['background', 'circle', 'square']


def detections(masks=True):
    found = {
        'boxes': torch.tensor([[2.0, 2, 50, 50], [10, 10, 60, 60], [0, 0, 63, 63]]),
        'labels': torch.tensor([1, 2, 1]),
        'scores': torch.tensor([0.9, 0.6, 0.2]),
    }
    if masks:
        found['masks'] = torch.zeros(3, 1, 64, 64)
        for i, (left, top, right, bottom) in enumerate(found['boxes'].int().tolist()):
            found['masks'][i, :, top + 4 : bottom - 4, left + 4 : right - 4] = 0.8
    return found


def colour(label, dtype):
    values = torch.tensor(colour_of(label))
    return values.to(dtype) if dtype == torch.uint8 else values.to(dtype) / 255


@pytest.mark.parametrize('dtype', [torch.uint8, torch.float32])
@pytest.mark.parametrize('enlarge', [1, 3])
def test_detections(dtype, enlarge):
    image = torch.zeros(3, 64, 64, dtype=dtype)
    before = image.clone()
    picture = draw_detections(image, detections(), CLASSES, enlarge=enlarge)
    assert picture.shape == (3, 64 * enlarge, 64 * enlarge) and picture.dtype == dtype
    assert torch.equal(image, before)
    near = {'atol': 2 if dtype == torch.uint8 else 0.01, 'rtol': 0}

    def at(y, x):
        return picture[:, y * enlarge, x * enlarge]

    torch.testing.assert_close(at(60, 25), colour(2, dtype), **near)  # the frame of the square
    torch.testing.assert_close(at(54, 54), (colour(2, dtype).float() / 2).to(dtype), **near)
    over = (colour(2, torch.float32) / 2 + colour(1, torch.float32)) / 2  # the higher score is on top
    expected = (255 * over).round().to(dtype) if dtype == torch.uint8 else over
    torch.testing.assert_close(at(40, 40), expected, **near)
    assert not at(0, 60).any(), 'scores below the threshold'
    assert draw_detections(image, detections(), CLASSES, 0.1, enlarge)[:, 0, 60 * enlarge].any()


def test_captions_say_class_and_score(monkeypatch):
    said = []

    def draw_bounding_boxes(picture, boxes, captions, *args, **kwargs):
        said.extend(captions)
        return picture

    monkeypatch.setattr('flatten_zoo.dense.pictures.draw_bounding_boxes', draw_bounding_boxes)
    draw_detections(torch.zeros(3, 64, 64), detections(False), ['background', 'ci\x1brcle', 'square'], 0)
    assert said == ['ci\\x1brcle 0.20', 'square 0.60', 'ci\\x1brcle 0.90']


def test_nothing_found():
    image = torch.rand(3, 20, 30)
    nothing = {'boxes': torch.zeros(0, 4), 'labels': torch.zeros(0, dtype=torch.long), 'scores': torch.zeros(0)}
    assert torch.equal(draw_detections(image, nothing, CLASSES), image)
    assert torch.equal(draw_detections(image, detections(False), CLASSES, 0.95), image)


@pytest.mark.parametrize('dtype', [torch.uint8, torch.float32])
def test_labels(dtype):
    image = torch.full((3, 1, 4), 200 if dtype == torch.uint8 else 0.8, dtype=dtype)
    picture = draw_labels(image, torch.tensor([[0, 1, 2, 255]]), CLASSES)
    assert picture.dtype == dtype and torch.equal(picture[..., [0, 3]], image[..., [0, 3]])
    for label in (1, 2):
        expected = (image[:, 0, label].float() + colour(label, dtype).float()) / 2
        torch.testing.assert_close(picture[:, 0, label].float(), expected, atol=1, rtol=0.01)
    # where it is no background, the first class has a colour as well
    assert not torch.equal(draw_labels(image, torch.tensor([[0, 1, 2, 255]]), ['sky', 'a', 'b'])[..., 0], image[..., 0])


@pytest.mark.parametrize('width', [40, 200])
def test_legend_has_the_classes_of_the_picture(width):
    legend = draw_legend(torch.tensor([[0, 2], [4, 255]]), [*CLASSES, 'not here', 'a tree'], width)
    assert legend.shape[::2] == (3, width) and legend.dtype == torch.uint8
    colours = {tuple(c) for c in legend.flatten(1).T.tolist()}
    assert {colour_of(2), colour_of(4)} <= colours and not {colour_of(0), colour_of(1), colour_of(3)} & colours
    assert legend.shape[1] == (2 * 16 + 4 if width == 40 else 16 + 4), 'a line for each where it is narrow'
    assert draw_legend(torch.tensor([0, 255]), CLASSES, width).shape == (3, 0, width)


def test_colours_differ():
    colours = torch.tensor([colour_of(label) for label in range(171)]).float()
    assert torch.equal(colours, torch.tensor([colour_of(label) for label in range(171)]).float())
    assert len(colours.unique(dim=0)) == 171
    assert min((a - b).abs().max() for a, b in itertools.pairwise(colours)) > 80
    assert torch.pdist(colours[:12]).min() > 60
