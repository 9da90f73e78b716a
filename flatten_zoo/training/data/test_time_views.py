"""Several views of each image in evaluation."""
import torch
from PIL import Image
from timm.data.transforms import CenterCropOrPad, center_crop_or_pad
from torchvision.transforms import CenterCrop, Compose
from torchvision.transforms import functional as F

__all__ = ['MOST_VIEWS', 'Views']

MOST_VIEWS = 10


class Views:
    """timm's evaluation transform, but with several crops of the resized image.

    They are the first of: the central crop, the top left, top right, bottom left and bottom right one, each followed
    by its mirror image; all ten together are those of Krizhevsky et al., 2012, Section 4.1.

    Args:
        transform: What `timm.data.create_transform` returns for evaluation.
        number: How many views, 1 to 10.
    """

    def __init__(self, transform: Compose, number: int):
        steps = transform.transforms
        place = next(i for i, step in enumerate(steps) if isinstance(step, CenterCrop | CenterCropOrPad))
        self.resize, self.crop, self.finish = Compose(steps[:place]), steps[place], Compose(steps[place + 1:])
        self.number = number

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """The views (number, C, H, W) of an image."""
        image = self.resize(image)
        crops = [self.crop(image)]
        if self.number > 2:
            crops += self._corners(image)
        views = [view for crop in crops for view in (crop, F.hflip(crop))]
        return torch.stack([self.finish(view) for view in views[:self.number]])

    def _corners(self, image: Image.Image) -> tuple[Image.Image, ...]:
        _, height, width = F.get_dimensions(image)
        at_least = [max(sides) for sides in zip(self.crop.size, (height, width), strict=True)]
        padded = center_crop_or_pad(image, at_least, fill=getattr(self.crop, 'fill', 0))
        return F.five_crop(padded, self.crop.size)[:4]
