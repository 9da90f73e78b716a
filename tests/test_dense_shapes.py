"""The generated shapes, and reading folders in COCO's format."""

import hashlib
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torchvision.transforms import v2

from flatten_zoo.dense import CocoInstances, CocoSemantic, coco_split, semantic_labels, write_shapes
from flatten_zoo.errors import UsageError

pytest.importorskip('pycocotools')

SQUARE = [[10, 10, 30, 10, 30, 30, 10, 30]]
TRIANGLE = [[0, 0, 60, 0, 0, 60]]


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data') / 'below' / 'shapes'
    assert write_shapes(folder, 40, image_size=(64, 96))
    return folder


def fingerprint(folder):
    digest = hashlib.sha256((folder / 'instances.json').read_bytes())
    for path in sorted((folder / 'images').iterdir()):
        digest.update(np.asarray(Image.open(path)).tobytes())
    return digest.hexdigest()


def test_shapes_are_deterministic(shapes, tmp_path):
    write_shapes(tmp_path / 'again', 40, image_size=(64, 96))
    assert fingerprint(shapes) == fingerprint(tmp_path / 'again')
    write_shapes(tmp_path / 'fewer', 3, image_size=(64, 96))
    write_shapes(tmp_path / 'other', 3, image_size=(64, 96), seed=1)
    first, fewer, other = (
        [np.asarray(Image.open(folder / 'images' / f'{i:06d}.png')) for i in range(3)]
        for folder in (shapes, tmp_path / 'fewer', tmp_path / 'other')
    )
    for a, b, c in zip(first, fewer, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()


def test_annotations_are_of_what_can_be_seen(shapes):
    data = CocoInstances(shapes)
    assert len(data) == 40
    assert data.classes == ['background', 'circle', 'square', 'triangle']
    seen, hidden = set(), 0
    for index, (image, target) in enumerate(data):
        assert image.shape == (3, 64, 96) and image.dtype == torch.float32 and 0 <= image.min() <= image.max() <= 1
        masks, boxes = target['masks'], target['boxes']
        assert 1 <= len(masks) == len(boxes) == len(target['labels']) <= 4
        assert masks.sum(0).max() == 1, 'each pixel belongs to one object'
        annotations = data.coco.loadAnns(data.coco.getAnnIds(index))
        for mask, box, label, annotation in zip(masks, boxes, target['labels'], annotations, strict=True):
            y, x = mask.nonzero(as_tuple=True)
            assert box.tolist() == [x.min(), y.min(), x.max() + 1, y.max() + 1]
            assert annotation['area'] == mask.sum() > 0 and not annotation['iscrowd']
            share = mask.sum() / ((box[2] - box[0]) * (box[3] - box[1]))
            hidden += label == 1 and share < 0.7  # pi / 4 where whole
            seen.add(int(label))
            # one colour, up to the noise
            assert image[:, mask.bool()].std(dim=1).max() < 0.06
    assert seen == {1, 2, 3}
    assert hidden


def test_second_time_changes_nothing(shapes):
    before = {p: p.stat().st_mtime_ns for p in shapes.rglob('*')}
    assert not write_shapes(shapes, 40, image_size=(64, 96))
    assert {p: p.stat().st_mtime_ns for p in shapes.rglob('*')} == before
    with pytest.raises(UsageError, match='does not hold these shapes'):
        write_shapes(shapes, 41, image_size=(64, 96))


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UsageError, match='does not hold these shapes'):
        write_shapes(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ['file']


def test_failure_leaves_nothing(tmp_path, monkeypatch):
    saved = []

    def save(self, path):
        saved.append(path)
        if len(saved) == 3:
            raise OSError('disk full')

    monkeypatch.setattr(Image.Image, 'save', save)
    with pytest.raises(OSError, match='disk full'):
        write_shapes(tmp_path / 'shapes', 5)
    assert len(saved) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'arguments, message',
    [
        ({'num_images': 0}, 'num_images must be positive, got 0'),
        ({'num_images': 1, 'image_size': (64, 16)}, 'image_size must be at least 32'),
        ({'num_images': 1, 'seed': -1}, 'seed must not be negative, got -1'),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        write_shapes(tmp_path / 'shapes', **arguments)
    assert not list(tmp_path.iterdir())


def test_without_pycocotools_says_what_to_install(shapes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pycocotools', None)
    monkeypatch.setitem(sys.modules, 'pycocotools.coco', None)
    with pytest.raises(UsageError, match=r"pip install 'flatten_zoo\[dense\]'"):
        write_shapes(tmp_path / 'shapes', 1)
    with pytest.raises(UsageError, match=r"pip install 'flatten_zoo\[dense\]'"):
        CocoInstances(shapes)


def annotation(id, category_id=7, segmentation=SQUARE, bbox=(10, 10, 20, 20), image_id=3, **more):
    return {
        'id': id,
        'image_id': image_id,
        'category_id': category_id,
        'bbox': list(bbox),
        'segmentation': segmentation,
        **more,
    }


def write_coco(folder, annotations, **content):
    """Two 60 × 80 images, 3 and 5, and categories 90 and 7."""
    (folder / 'images').mkdir()
    images = [{'id': i, 'file_name': f'{i}.png', 'height': 60, 'width': 80} for i in (3, 5)]
    for image in images:
        Image.new('L', (80, 60), 128).save(folder / 'images' / image['file_name'])
    categories = [{'id': 90, 'name': 'cat'}, {'id': 7, 'name': 'dog'}]
    content = {'images': images, 'annotations': annotations, 'categories': categories, **content}
    (folder / 'instances.json').write_text(json.dumps(content))
    return folder


def test_other_peoples_annotations(tmp_path):
    counts = [0, 60 * 10, 60 * 70]  # the ten columns on the left, uncompressed
    data = CocoInstances(
        write_coco(
            tmp_path,
            [
                annotation(1),
                annotation(2, 90, TRIANGLE, (0, 0, 60, 60)),
                annotation(3, 90, {'size': [60, 80], 'counts': counts}, (0, 0, 10, 60), iscrowd=1),
                annotation(4, 7, SQUARE, (10, 10, 0, 20)),
                annotation(5, 7, SQUARE, (70, 50, 20, 20)),
            ],
        )
    )
    assert data.classes == ['background', 'dog', 'cat']
    assert data.category_ids == [None, 7, 90]
    image, target = data[0]
    assert image.shape == (3, 60, 80)
    assert target['image_id'] == 3
    assert target['labels'].tolist() == [1, 2, 1], 'neither the crowd nor the box without an area'
    assert target['boxes'].tolist() == [[10, 10, 30, 30], [0, 0, 60, 60], [70, 50, 80, 60]]
    assert target['masks'].dtype == torch.uint8
    assert target['masks'][0, 10:30, 10:30].all() and target['masks'][0].sum() == 400

    _, empty = data[1]
    assert empty['boxes'].shape == (0, 4) and empty['boxes'].dtype == torch.float32
    assert empty['labels'].shape == (0,) and empty['labels'].dtype == torch.int64
    assert empty['masks'].shape == (0, 60, 80)

    _, labels = CocoSemantic(tmp_path)[0]
    assert labels[20, 20] == 1, 'the small square lies on the large triangle'
    assert labels[5, 40] == 2
    assert labels[59, 5] == 2, 'crowds count'
    assert labels[59, 79] == 0
    assert not CocoSemantic(tmp_path)[1][1].any()


def test_splits(tmp_path):
    for split in ('train', 'val'):
        write_shapes(tmp_path / 'ours' / split, 2, image_size=32, seed=split == 'val')
    (train, _), (val, _) = (CocoInstances(**coco_split(tmp_path / 'ours', split))[0] for split in ('train', 'val'))
    assert (train != val).any()
    official = tmp_path / 'official'
    (official / 'annotations').mkdir(parents=True)
    for split in ('train', 'val'):
        (tmp_path / 'ours' / split / 'images').rename(official / f'{split}2017')
        (tmp_path / 'ours' / split / 'instances.json').rename(official / f'annotations/instances_{split}2017.json')
    torch.testing.assert_close(CocoSemantic(**coco_split(official, 'val'))[0][0], val)


def test_boxes_alone(tmp_path):
    boxes = annotation(1)
    del boxes['segmentation']
    write_coco(tmp_path, [boxes])
    with pytest.raises(UsageError, match='annotation 1 has no segmentation'):
        CocoInstances(tmp_path)
    data = CocoInstances(tmp_path, masks=False)
    assert set(data[0][1]) == set(data[1][1]) == {'image_id', 'boxes', 'labels'}
    assert data[0][1]['labels'].tolist() == [1]


def test_transforms_move_image_and_objects_together(shapes):
    plain, flipped = CocoInstances(shapes), CocoInstances(shapes, v2.RandomHorizontalFlip(p=1))
    (image, target), (image2, target2) = plain[0], flipped[0]
    torch.testing.assert_close(image2, image.flip(-1))
    torch.testing.assert_close(target2['masks'], target['masks'].flip(-1))
    torch.testing.assert_close(target2['boxes'][:, [2, 0]], 96 - target['boxes'][:, [0, 2]])
    torch.testing.assert_close(
        CocoSemantic(shapes, v2.RandomHorizontalFlip(p=1))[0][1], CocoSemantic(shapes)[0][1].flip(-1)
    )


def test_loads_in_other_processes(shapes):
    data = pickle.loads(pickle.dumps(CocoInstances(shapes)))  # as the spawned ones get it
    (image, target), _ = next(iter(torch.utils.data.DataLoader(data, 2, num_workers=1, collate_fn=list)))
    torch.testing.assert_close(image, CocoInstances(shapes)[0][0])
    assert len(target['masks'])


def test_semantic_labels_of_equal_areas():
    masks = torch.zeros(3, 4, 4, dtype=torch.uint8)
    masks[0, :2], masks[1, 1:3], masks[2] = 1, 1, 1
    assert semantic_labels(masks, torch.tensor([1, 2, 3]))[:, 0].tolist() == [1, 2, 2, 3]


@pytest.mark.parametrize(
    'bad, message',
    [
        (annotation(9, category_id=8), 'annotation 9 is of category 8'),
        (annotation(9, image_id=8), 'annotation 9 is of image 8'),
        (annotation(9, bbox=(1, 2, 3)), 'annotation 9 has bbox'),
        (annotation(9, bbox=(1, 2, 3, float('nan'))), 'annotation 9 has bbox'),
        (annotation(9, segmentation=[]), 'annotation 9 has no segmentation'),
        (annotation(9, segmentation=[[1, 2, 3, 4]]), 'annotation 9 has no segmentation'),
        ({'id': 9, 'image_id': 3, 'category_id': 7}, "an entry of 'annotations' has no bbox"),
        ({'id': 9, 'image_id': 3}, "an entry of 'annotations' has no category_id"),
        (5, "an entry of 'annotations' is no dictionary"),
        (annotation(1), "2 entries of 'annotations' have id 1"),
        (annotation('nine'), "id 'nine', which is no whole number"),
        (annotation(True), 'id True, which is no whole number'),
        (annotation(9, image_id=[3]), 'annotation 9 is of image'),
        ({**annotation(9), 'bbox': None}, 'annotation 9 has bbox None'),
        (annotation(9, bbox=(1, 2, '3', 4)), 'annotation 9 has bbox'),
        (annotation(9, bbox=(30, 30, -10, -10)), 'annotation 9 .*negative width or height'),
        (annotation(9, bbox=(1, 2, 3, 1e300)), 'annotation 9 .*far outside its image of 60 × 80'),
        (annotation(9, bbox=(1, 2, 3, 10**400)), 'annotation 9 has bbox'),
        (annotation(9, iscrowd=None), 'annotation 9 has iscrowd None'),
        (annotation(9, area=None), 'annotation 9 has area None'),
        (annotation(9, segmentation=None, iscrowd=1), 'annotation 9 has no segmentation'),
        (annotation(9, segmentation=[[1, 2, 3, 4, 5, None]]), 'annotation 9 has a polygon with other things'),
        (annotation(9, segmentation=[[1, 2, 3, 4, 5, 1e9]]), 'annotation 9 has a polygon far outside'),
        (
            annotation(9, segmentation={'size': [80, 60], 'counts': [4800]}),
            r'annotation 9 has run lengths of size \[80',
        ),
        (annotation(9, segmentation={'counts': [4800]}), 'annotation 9 has run lengths of size None'),
        (annotation(9, segmentation={'size': [60, 80]}), 'annotation 9 has counts that are no run lengths: None'),
        (
            annotation(9, segmentation={'size': [60, 80], 'counts': [100, 5]}),
            'annotation 9 has run lengths of 105 pixels',
        ),
        (annotation(9, segmentation={'size': [60, 80], 'counts': [-1, 4801]}), 'annotation 9 has counts'),
        (annotation(9, segmentation={'size': [60, 80], 'counts': '53'}), 'annotation 9 has run lengths of 8 pixels'),
        (annotation(9, segmentation={'size': [60, 80], 'counts': 'é~'}), 'annotation 9 has counts'),
        (annotation(9, segmentation={'size': [60, 80], 'counts': 'oooooooo5'}), 'annotation 9 has counts'),
        (annotation(9, segmentation={'size': [60, 80], 'counts': 'o'}), 'annotation 9 has counts'),
    ],
)
def test_bad_annotations(tmp_path, bad, message):
    write_coco(tmp_path, [annotation(1), bad])
    with pytest.raises(UsageError, match=message):
        CocoInstances(tmp_path)


def test_objects_without_extent_are_named_and_left_out(tmp_path, caplog):
    """COCO itself has them, and torchvision's networks stop at them in the middle of an epoch."""
    bow_tie = [[10, 10, 30, 30, 30, 10, 10, 30]]
    write_coco(
        tmp_path,
        [
            annotation(1, segmentation=bow_tie),
            annotation(2, bbox=(10, 10, 0, 20)),
            annotation(3, bbox=(10, 10, 20, 1e-5)),
            annotation(4, bbox=(90, 10, 20, 20)),
            annotation(5, segmentation=[[1, 2, 11, 12, 5, 6]]),
            annotation(6, segmentation={'size': [60, 80], 'counts': [4800]}),
            annotation(7, bbox=(10, 10, 0, 20), iscrowd=1),
        ],
    )
    data = CocoInstances(tmp_path)
    (message,) = caplog.messages
    for i in range(2, 7):
        assert f"{i} of image '3.png'" in message
    assert '7 of image' not in message and '\n' not in message
    assert data[0][1]['boxes'].tolist() == [[10, 10, 30, 30]]
    assert len(data.read(0)[1]['boxes']) == 7
    assert len(CocoInstances(tmp_path, masks=False)[0][1]['boxes']) == 3


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UsageError, match='there is no file of annotations'):
        CocoInstances(tmp_path)
    for broken, message in {
        '{': 'JSONDecodeError',
        '[]': 'it holds a list',
        '{"images": 1}': "it has no list 'images'",
        '[' * 100_000: 'RecursionError',
        '{"images": []}': "it has no list 'categories'",
        '{"images": [{"id": 1}]}': "an entry of 'images' has no file_name",
    }.items():
        (tmp_path / 'instances.json').write_text(broken)
        with pytest.raises(UsageError, match=message):
            CocoInstances(tmp_path)


def test_images_of_16_bits_and_turned_ones(tmp_path):
    data = CocoInstances(write_coco(tmp_path, [annotation(1)]))
    grey = np.arange(60 * 80, dtype=np.uint8).reshape(60, 80)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(np.rot90(grey) * np.uint16(257)).save(tmp_path / 'images' / '5.png', exif=exif)
    np.testing.assert_allclose(data[1][0], np.broadcast_to(grey / 255, (3, 60, 80)), atol=1e-6)


def test_missing_and_broken_images(tmp_path):
    write_coco(tmp_path, [annotation(1)])
    data = CocoInstances(tmp_path)
    (tmp_path / 'images' / '5.png').write_bytes(b'no image')
    with pytest.raises(UsageError, match=r"cannot read image '.*5\.png'"):
        data[1]
    Image.new('RGB', (50, 60)).save(tmp_path / 'images' / '5.png')
    with pytest.raises(UsageError, match=r"5\.png' is 60 × 50, its annotations are for 60 × 80"):
        data[1]
    (tmp_path / 'images' / '5.png').unlink()
    with pytest.raises(UsageError, match=r'there is no image .*5\.png'):
        CocoInstances(tmp_path)
