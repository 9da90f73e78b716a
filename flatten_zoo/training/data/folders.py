"""Folders and tar files of images: what of them is read, and a line about what is not."""
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator

from timm.data import ImageDataset
from timm.data.readers.class_map import load_class_map
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar, TarState
from timm.utils.misc import natural_key
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from flatten_zoo.errors import UsageError
from flatten_zoo.images import image_suffixes, open_image

from ..output.logs import log

__all__ = ['Split', 'open_folder']

# Hidden files and folders, and others that systems and their programs leave; './' and '../' are none.
SYSTEM = re.compile(
    r'(?:^|[/\\])(\._|\.(?!\.?(?:[/\\]|$))[^/\\]*|(?:__macosx|(?:eh)?thumbs\.db|desktop\.ini|\$recycle\.bin'
    r'|system volume information|lost\+found|@eadir)(?=[/\\]|$))',
    re.IGNORECASE)
MOST_NAMED = 8


class Split:
    """Which files of a split are images, and of which class: timm's rules, but nothing is left out without a word.

    Args:
        root: Folder or tar file, for messages.
        suffixes: Suffixes of images with semicolons between them; all that Pillow decodes if None.
        class_map: File with the classes in order of index; if None they are the folders' names in natural order.
    """

    def __init__(self, root: str, suffixes: str | None, class_map: str | None = None):
        self.root = root
        self.suffixes = set(suffixes.split(';')) if suffixes else image_suffixes()
        self.class_map = load_class_map(class_map, root) if class_map else None
        self.left_out = Counter()

    def is_image(self, path: str) -> bool:
        """Whether a file is to be read, by its path within the split; one that is not is counted."""
        if of_system := SYSTEM.search(path):
            self.left_out['._*' if of_system[1] == '._' else of_system[1]] += 1
            return False
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in self.suffixes:
            self.left_out[f'*{suffix}' if suffix else 'without suffix'] += 1
            return False
        return True

    def say_left_out(self) -> None:
        """Say which files are no images, and how many."""
        if left_out := (+self.left_out).most_common():
            kinds = [f'{number} {ascii(kind)[1:-1]}' for kind, number in left_out]
            log.info("'%s': files left out: %s", self.root, _some(kinds))

    def index_classes(self, labels: list[str], leaves: Iterable[str] = ()) -> dict[str, int]:
        """Index of each class, once all files are seen; says what is left out and which classes are empty.

        Args:
            labels: Name of the folder of each image, '' for those in no folder.
            leaves: Paths of the folders that have no others in them.

        Raises:
            UsageError: There is no image, or none in a folder.
        """
        found = Counter(labels)
        self.left_out['in no class folder'] = found.pop('', 0)
        index = self.class_map or {name: i for i, name in enumerate(sorted(found, key=natural_key))}
        self.left_out['of no class in --class-map'] = sum(n for name, n in found.items() if name not in index)
        self.say_left_out()
        expected = self.class_map or [os.path.basename(path) for path in leaves if not SYSTEM.search(path)]
        if empty := sorted(set(expected) - found.keys(), key=natural_key):
            names = _some([ascii(name) for name in empty])
            hint = '' if self.class_map else ', which does not count: if it should, name all classes in --class-map'
            log.info("'%s': there is no image of class %s%s", self.root, names, hint)
        if found.keys() & index.keys():
            return index
        if labels:
            raise UsageError(
                f"the images in '{self.root}' are not in class folders{' that --class-map names' if found else ''}: "
                f'put each into a folder with the name of its class')
        raise UsageError(f"there are no images in '{self.root}'")


def _some(names: list[str]) -> str:
    return ', '.join(names[:MOST_NAMED]) + (f' and {len(names) - MOST_NAMED} more' if len(names) > MOST_NAMED else '')


class FolderReader(ReaderImageFolder):
    """timm's reader of a folder, for the images of `Split`."""

    def __init__(self, root: str, class_map: str | None, suffixes: str | None):
        Reader.__init__(self)
        self.root = root
        split = Split(root, suffixes, class_map)
        files, leaves = [], []
        for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise):
            inside = '' if folder == root else os.path.relpath(folder, root)
            files += [path for name in names if split.is_image(path := os.path.join(inside, name))]
            if inside and not subfolders:
                leaves.append(inside)
        labels = [_label(path) for path in files]
        self.class_to_idx = split.index_classes(labels, leaves)
        self.samples = sorted(
            ((os.path.join(root, path), self.class_to_idx[label])
             for path, label in zip(files, labels, strict=True) if label in self.class_to_idx),
            key=lambda sample: natural_key(sample[0]))


def _raise(error: OSError) -> None:
    raise error


def _label(path: str) -> str:
    return os.path.basename(os.path.dirname(path))


class TarReader(ReaderImageInTar):
    """timm's reader of a tar file, which may hold others, for the images of `Split`."""

    def __init__(self, root: str, class_map: str | None, suffixes: str | None):
        Reader.__init__(self)
        self.root, self.root_is_tar, self.cache_tarfiles, self.tar_state = root, True, True, TarState()
        split = Split(root, suffixes, class_map)
        files, folders = [], set()
        with tarfile.open(root) as tar:
            for path, member, inner in _members(tar):
                if member.isdir():
                    folders.add(path)
                elif member.isfile() and split.is_image(path):
                    files.append((_label(path), member, inner))
                    if inner:
                        self.tar_state.children[inner.name] = TarState(ti=inner)
        leaves = folders - {os.path.dirname(path) for path in folders} - {'.'}
        self.class_name_to_idx = split.index_classes([label for label, *_ in files], leaves)
        files = sorted(
            (file for file in files if file[0] in self.class_name_to_idx), key=lambda file: natural_key(file[1].path))
        self.samples = [(member, None, inner) for _, member, inner in files]
        self.targets = [self.class_name_to_idx[label] for label, *_ in files]


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarInfo | None]]:
    """Path, entry and the tar file that it is in, where it is in one of those in the tar file; those are folders."""
    for member in tar:
        path = os.path.normpath(member.path)
        if member.isfile() and path.lower().endswith('.tar') and not SYSTEM.search(path):
            with tarfile.open(fileobj=tar.extractfile(member), mode='r|') as inner:
                for entry in inner:
                    yield os.path.normpath(os.path.join(path[:-len('.tar')], entry.path)), entry, member
        else:
            yield path, member, None


class TorchvisionFolder(ImageFolder):
    """torchvision's data set of a folder, where the classes are the folders of the first level, for those images."""

    def __init__(self, root: str, suffixes: str | None):
        split = Split(root, suffixes)
        super().__init__(
            root, loader=open_image, is_valid_file=lambda path: split.is_image(os.path.relpath(path, root)))
        loose = [name for name in os.listdir(root) if name not in self.class_to_idx and split.is_image(name)]
        split.index_classes([self.classes[target] for target in self.targets] + [''] * len(loose))

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        classes = [name for name in super().find_classes(directory)[0] if not SYSTEM.search(name)]
        return classes, {name: i for i, name in enumerate(classes)}


def open_folder(kind: str, root: str, class_map: str | None, suffixes: str | None) -> Dataset:
    """The data set of a folder or tar file, with its images as they are in their files.

    Args:
        kind: `torch/…` for torchvision's, empty for timm's.
        root: Folder, or for timm's also a tar file.
        class_map: File that `--class-map` names, for timm's.
        suffixes: Suffixes of images with semicolons between them; all that Pillow decodes if None.

    Raises:
        UsageError: There is no image, or none in a class folder.
    """
    if kind:
        return TorchvisionFolder(root, suffixes)
    reader = TarReader if os.path.isfile(root) else FolderReader
    return ImageDataset(root, reader(root, class_map, suffixes), input_img_mode='')
