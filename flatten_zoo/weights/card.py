"""Model cards."""

import re

from huggingface_hub import ModelCard, ModelCardData

from .._timm import generate_readme
from ..models import RELEASES, Release
from ..models._released import TAG
from ..models.linearized import full_name

__all__ = ['REPOSITORY', 'model_card']

REPOSITORY = 'ACCOUNT/NAME'  # what a card says until it is published

CITATIONS = {  # by the first word of a model's name
    'flatten': """@inproceedings{han2023flatten,
  title = {{FLatten} Transformer: Vision Transformer using Focused Linear Attention},
  author = {Han, Dongchen and Pan, Xuran and Han, Yizeng and Song, Shiji and Huang, Gao},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision (ICCV)},
  year = {2023}
}""",
    'ea': """@inproceedings{shen2021efficient,
  title = {Efficient Attention: Attention with Linear Complexities},
  author = {Shen, Zhuoran and Zhang, Mingyuan and Zhao, Haiyu and Yi, Shuai and Li, Hongsheng},
  booktitle = {Proceedings of the IEEE/CVF Winter Conference on Applications of Computer Vision (WACV)},
  year = {2021}
}""",
    'issa': """@article{huang2019interlaced,
  title = {Interlaced Sparse Self-Attention for Semantic Segmentation},
  author = {Huang, Lang and Yuan, Yuhui and Guo, Jianyuan and Zhang, Chao and Chen, Xilin and Wang, Jingdong},
  journal = {arXiv preprint arXiv:1907.12273},
  year = {2019}
}""",
    'nl': """@inproceedings{wang2018nonlocal,
  title = {Non-local Neural Networks},
  author = {Wang, Xiaolong and Girshick, Ross and Gupta, Abhinav and He, Kaiming},
  booktitle = {Proceedings of the IEEE Conference on Computer Vision and Pattern Recognition (CVPR)},
  year = {2018}
}""",
}
CITED = {'focused_linear': 'flatten', 'efficient': 'ea'}  # for the attention that a network has got
OFFICIAL_LICENSE = (
    "not known: these weights are the authors', converted to other names; their terms are for the authors to say"
)
OWN_LICENSE = 'not stated: whoever publishes these weights sets their terms, here and in `license` at the top'
USAGE = f"""```python
import flatten_zoo  # registers the model with timm
import timm

model = timm.create_model('hf-hub:{REPOSITORY}', pretrained=True).eval()  # or 'local-dir:' and a folder
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
```
It also serves as a backbone, with `features_only=True`, and can be fine-tuned, with `num_classes=`."""


def model_card(config: dict, parameters: int, name: str) -> str:
    """The model card (README.md) of a folder in timm's Hub layout.

    Args:
        config: What its config.json holds.
        parameters: Number of parameters.
        name: Title.
    """
    cfg = config['pretrained_cfg']
    architecture, arguments = config['architecture'], config['model_args']
    called = full_name(architecture, arguments)
    release = RELEASES.get(architecture) if cfg.get('tag') == TAG else None
    details = {
        'Architecture': f'{called}, {parameters / 1e6:.2f} M parameters, {config["num_classes"]} classes',
        'Evaluation settings': {
            'input': ' × '.join(map(str, cfg['input_size'])),
            'resize and crop': (
                f'{_plain(cfg["interpolation"])}, crop_pct {cfg["crop_pct"]:.4g}, mode {_plain(cfg["crop_mode"])}'
            ),
            'mean': ', '.join(map(str, cfg['mean'])),
            'std': ', '.join(map(str, cfg['std'])),
        },
    }
    if release:
        details['Dataset'] = 'ImageNet-1k'
        details['Weights'] = f'official, {cfg.get("origin_url", release.address)}'
        details['Reported by the authors on ImageNet-1K'] = accuracy_text(release)
    if cfg.get('paper_name'):
        details['Paper'] = f'{cfg["paper_name"]}, {cfg["paper_ids"]}'
    details['License of the weights'] = OFFICIAL_LICENSE if release else OWN_LICENSE
    card = dict(
        description=f'A {called} image classifier for timm and flatten_zoo.',
        details=details,
        usage=USAGE,
        citation=CITATIONS[CITED.get(arguments.get('attention'), architecture.partition('_')[0])],
    )
    data = ModelCardData(
        tags=['image-classification', 'timm', 'flatten_zoo'],
        pipeline_tag='image-classification',
        library_name='timm',
        license='unknown',
        datasets=['imagenet-1k'] if release else None,
    )
    text = ModelCard(generate_readme(card, _plain(name))).text
    return f'---\n{data.to_yaml()}\n---\n{text}'


def _plain(text: object) -> str:
    """Text as Markdown that shows it: in one line, without markup."""
    return re.sub(r'([\\`*{}\[\]<>#|~!&])', r'\\\1', ' '.join(str(text).split()))


def accuracy_text(release: Release) -> str:
    """A release's reported accuracy."""
    return f'{release.top1} % top-1' + (f', {release.top5} % top-5' if release.top5 else '')
