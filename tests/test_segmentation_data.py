"""Images and label maps in the layouts of the segmentation data sets, and in layouts of one's own."""

import pickle

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from flatten_zoo.dense import segmentation_layouts, segmentation_split
from flatten_zoo.errors import UsageError

SIZE = (6, 10)


def save(path, values, mode=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values))
    if mode == 'P':
        image = Image.frombytes('P', image.size, image.tobytes())
        image.putpalette([255 - i // 3 for i in range(768)])  # colours say nothing
    image.save(path, **options)


def picture(size=SIZE):
    return np.arange(3 * size[0] * size[1], dtype=np.uint8).reshape(*size, 3)


def values_of(*values, size=SIZE, dtype=np.uint8):
    """A label map that has these values, each at least once."""
    return np.resize(np.array(values, dtype), size)


@pytest.mark.parametrize(
    'layout, images, labels, mode, values, expected, classes',
    [
        (
            'ade20k',
            'images/{}/ADE_00000001.jpg',
            'annotations/{}/ADE_00000001.png',
            'L',
            [0, 1, 2, 150],
            [255, 0, 1, 149],
            {0: 'wall', 1: 'building', 149: 'flag'},
        ),
        (
            'cityscapes',
            'leftImg8bit/{}/ulm/ulm_0_1_leftImg8bit.png',
            'gtFine/{}/ulm/ulm_0_1_gtFine_labelIds.png',
            'L',
            [0, 6, 7, 8, 9, 11, 30, 33],
            [255, 255, 0, 1, 255, 2, 255, 18],
            {0: 'road', 1: 'sidewalk', 2: 'building', 18: 'bicycle'},
        ),
        (
            'voc2012',
            'JPEGImages/2007_000032.jpg',
            'SegmentationClass/2007_000032.png',
            'P',
            [0, 1, 20, 255],
            [0, 1, 20, 255],
            {0: 'background', 20: 'tvmonitor'},
        ),
        (
            'coco_stuff',
            'images/{}/000000000009.jpg',
            'annotations/{}/000000000009.png',
            'L',
            [0, 10, 12, 91, 181, 255],
            [0, 10, 11, 80, 170, 255],
            {0: 'person', 10: 'fire hydrant', 11: 'stop sign', 80: 'banner', 170: 'wood'},
        ),
        (
            'pascal_context',
            'JPEGImages/2008_000002.jpg',
            'SegmentationClassContext/2008_000002.png',
            'P',
            [0, 1, 59],
            [255, 0, 58],
            {0: 'aeroplane', 58: 'wood'},
        ),
        (
            'lip',
            'TrainVal_images/{}_images/77_1.jpg',
            'TrainVal_parsing_annotations/{}_segmentations/77_1.png',
            'L',
            [0, 19],
            [0, 19],
            {0: 'background', 1: 'hat', 19: 'right shoe'},
        ),
    ],
)
def test_layouts_by_name(tmp_path, layout, images, labels, mode, values, expected, classes):
    numbers = {'ade20k': 150, 'cityscapes': 19, 'coco_stuff': 171, 'lip': 20, 'pascal_context': 59, 'voc2012': 21}
    assert segmentation_layouts() == sorted(numbers)
    folders = {'ade20k': ('training', 'validation'), 'coco_stuff': ('train2017', 'val2017')}.get(
        layout, ('train', 'val')
    )
    lists = {'voc2012': 'ImageSets/Segmentation', 'pascal_context': 'ImageSets/SegmentationContext'}.get(layout)
    for folder in folders:
        save(tmp_path / images.format(folder), picture())
        save(tmp_path / labels.format(folder), values_of(*values), mode)
        if lists:
            (tmp_path / lists).mkdir(parents=True, exist_ok=True)
            (tmp_path / lists / f'{folder}.txt').write_text('2007_000032\n' if layout == 'voc2012' else '2008_000002\n')
    if lists:  # of most images there are no labels
        save(tmp_path / 'JPEGImages' / '2012_004331.jpg', picture())
    for split in ('train', 'val'):
        data = segmentation_split(layout, tmp_path, split)
        assert len(data) == 1 and len(data.classes) == numbers[layout] and data.ignore_index == 255
        assert {i: data.classes[i] for i in classes} == classes
        image, mask = data[0]
        assert isinstance(image, tv_tensors.Image) and isinstance(mask, tv_tensors.Mask)
        assert image.shape == (3, *SIZE) and image.dtype == torch.float32 and 0 <= image.min() < image.max() <= 1
        assert mask.dtype == torch.int64 and np.array_equal(mask, values_of(*expected, dtype=np.int64))


@pytest.fixture
def own(tmp_path):
    """A data set with a layout of one's own; the function writes the layout's file and opens it."""
    folder = tmp_path / 'data'
    for split in ('training', 'val'):
        save(folder / 'photos' / split / 'a' / '1.jpg', picture())
        save(folder / 'maps' / split / 'a' / '1.png', values_of(0, 1, 7, 9))
        save(folder / 'photos' / split / '2.png', picture())
        save(folder / 'maps' / split / '2.png', values_of(7, 7, 2))

    def opened(split='train', transforms=None, **keys):
        content = {
            'images': 'photos/{split}/{name}.*',
            'labels': 'maps/{split}/{name}.png',
            'splits': {'train': 'training'},
            'classes': {2: 'road', 1: 'road', 7: 'sky'},
            'ignored': [0, 9],
            **keys,
        }
        path = tmp_path / 'layout.yaml'
        path.write_text(
            yaml.safe_dump({key: value for key, value in content.items() if value is not None}, sort_keys=False)
        )
        return segmentation_split(path, folder, split, transforms)

    opened.folder = folder
    return opened


def test_a_layout_of_ones_own(own):
    data = own()
    assert data.classes == ['road', 'sky'] and len(data) == 2, 'values of one name are one class'
    assert [sorted(set(mask.flatten().tolist())) for _, mask in data] == [[0, 1], [0, 1, 255]]
    assert own(ignore_index=77)[1][1].max() == 77
    assert own('val', classes=[*'abcdefgh'], ignored=[9])[0][1].unique().tolist() == [2, 7], 'a list counts from 0'
    (own.folder / 'some.txt').write_text('a/1\n\n')
    assert (
        len(own(list='{split}.txt', images='photos/training/{name}.*', labels='maps/val/{name}.png', split='some')) == 1
    )

    pairs = own(transforms=v2.Compose([v2.Resize(3), v2.RandomHorizontalFlip(p=1)]))
    assert [tuple(image.shape) for image, _ in pairs] == [(3, 3, 5), (3, 3, 5)]
    assert pairs[1][1].shape == (3, 5) and set(pairs[1][1].unique().tolist()) <= {0, 1, 255}
    assert torch.equal(pickle.loads(pickle.dumps(data))[0][1], data[0][1])


@pytest.mark.parametrize('kind', ['palette', '16 bits', '1 bit', 'two bits of a palette'])
def test_every_kind_of_label_map(own, kind):
    path = own.folder / 'maps' / 'training' / '2.png'
    values = values_of(0, 1)
    if kind == '16 bits':
        values = values_of(0, 60000, dtype=np.uint16)
    save(path, values.astype(bool) if kind == '1 bit' else values, 'P' if 'palette' in kind else None)
    if kind == 'two bits of a palette':
        Image.open(path).save(path, bits=2)
    data = own(classes={0: 'a', 60000 if kind == '16 bits' else 1: 'b', 7: 'sky'}, ignored=[])
    assert np.array_equal(data[0][1], values != 0)


def test_images_are_seen_as_they_are_meant(own):
    upright = picture(SIZE)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    path = own.folder / 'photos' / 'training' / '2.png'
    Image.fromarray(np.rot90(upright).copy()).save(path, exif=exif)
    assert np.array_equal((own()[0][0] * 255).round().permute(1, 2, 0), upright)
    transparent = np.dstack([upright, np.zeros(SIZE, np.uint8)])
    Image.fromarray(transparent).save(path)
    assert own()[0][0].eq(1).all()


@pytest.mark.parametrize(
    'spoil, message',
    [
        (lambda photos, maps: (maps / '2.png').unlink(), r"there is no '.*maps/training/2\.png'"),
        (lambda photos, maps: (photos / '2.png').unlink(), r"there is no '.*photos/training/2\.\*'"),
        (
            lambda photos, maps: save(maps / '2.png', values_of(7, size=(5, 9))),
            r"maps/.*2\.png' is 5 × 9, .* is 6 × 10",
        ),
        (lambda photos, maps: save(maps / '2.png', picture()), r"maps/.*2\.png': it is a picture of mode RGB"),
        (lambda photos, maps: (maps / '2.png').write_bytes(b'no'), r"cannot read '.*maps/training/2\.png'"),
        (lambda photos, maps: (photos / '2.png').write_bytes(b'no'), r"cannot read '.*photos/training/2\.png'"),
        (lambda photos, maps: save(photos / '2.jpg', picture()), r"2\.jpg' and '.*2\.png' have the same name"),
    ],
)
def test_files_are_checked_when_opened(own, spoil, message):
    spoil(own.folder / 'photos' / 'training', own.folder / 'maps' / 'training')
    with pytest.raises(UsageError, match=message) as e:
        own()
    assert '\n' not in str(e.value)


def test_labels_are_checked_when_read(own):
    save(own.folder / 'maps' / 'training' / '2.png', values_of(2, 7, 8))
    data = own()
    with pytest.raises(UsageError, match=r"'.*maps/training/2\.png' has label 8, which is none of the 2 classes"):
        data[0]
    path = own.folder / 'maps' / 'training' / 'a' / '1.png'
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UsageError, match=r"cannot read '.*maps/training/a/1\.png'"):
        data[1]


@pytest.mark.parametrize(
    'keys, message',
    [
        ({'pictures': 'x'}, "has an unknown key 'pictures'"),
        ({'labels': None}, 'has no labels'),
        ({'labels': 'maps'}, r"has labels 'maps', not a path with \{name\} once"),
        ({'images': 3}, 'has images 3, not a path'),
        ({'images': 'photos/{name}.png'}, 'has no {split} in images'),
        ({'list': 'all.txt'}, 'has no {split} in list'),
        ({'list': '{split}.txt'}, "cannot read '.*training.txt', the list of images"),
        ({'splits': ['train']}, r"has splits \['train'\], not a name for each split"),
        ({'classes': []}, 'has classes {}, neither names nor'),
        ({'classes': {1: 2}}, 'has classes {1: 2}, neither names nor'),
        ({'classes': {'road': 'road'}}, "has value 'road', which is not a whole number"),
        ({'classes': {70000: 'road'}}, 'has value 70000, which is not a whole number from 0 to 65535'),
        ({'ignored': 0}, 'has ignored 0, which is no list'),
        ({'ignored': [True]}, 'has value True, which is not a whole number'),
        ({'ignored': [7]}, 'has value 7 in classes and in ignored'),
        ({'ignore_index': 1}, 'has ignore_index 1, not a number beyond the 2 labels'),
        (
            {'images': 'none/{split}/{name}.png', 'labels': 'none/{name}.png'},
            "there are no pairs such as 'none/training/",
        ),
    ],
)
def test_bad_layouts(own, keys, message):
    with pytest.raises(UsageError, match=message) as e:
        own(**keys)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('text', ['- a', '{', 'images: !!python/name:os.system', ''])
def test_what_is_no_layout(tmp_path, text):
    (tmp_path / 'x.yml').write_text(text)
    with pytest.raises(UsageError, match="the layout '.*x.yml' ") as e:
        segmentation_split(tmp_path / 'x.yml', tmp_path, 'train')
    assert '\n' not in str(e.value)
    with pytest.raises(UsageError, match="unknown layout 'ade20'; did you mean ade20k"):
        segmentation_split('ade20', tmp_path, 'train')
    with pytest.raises(UsageError, match='nowhere.yaml.* cannot be read'):
        segmentation_split('nowhere.yaml', tmp_path, 'train')
