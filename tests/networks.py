"""Small networks of every family."""

import timm
import torch

RESNETS = ('ea_resnet50', 'issa_resnet50', 'nl_resnet50')
# one small network of each FLatten family
SMALL = {
    'flatten_pvt_t': dict(img_size=64, depths=(1, 1, 2, 1), embed_dims=(16, 32, 40, 64)),
    'flatten_pvt_v2_b0': dict(img_size=64, depths=(1, 1, 2, 1), embed_dims=(16, 32, 40, 64)),
    'flatten_swin_t': dict(img_size=64, depths=(1, 1, 2, 1), embed_dim=16, num_heads=(1, 2, 4, 8), window_size=2),
    'flatten_cswin_t': dict(img_size=64, depths=(1, 1, 2, 1), embed_dim=16, num_heads=(2, 2, 4, 8), split_sizes=2),
    'flatten_deit_t': dict(img_size=64, depth=5, embed_dim=48, num_heads=3),
}
# and of fewer layers, where each takes long, such as in tracing; Swin needs two for shifted windows
SHALLOW = {
    **{name: arguments | {'depths': (1, 1, 1, 1)} for name, arguments in SMALL.items() if 'depths' in arguments},
    'flatten_swin_t': SMALL['flatten_swin_t'],
    'flatten_deit_t': SMALL['flatten_deit_t'] | {'depth': 3},
    **dict.fromkeys(RESNETS, dict(layers=(1, 1, 1, 1), channels=(8, 16, 24, 32), zero_init_last=False)),
}
FIXED_SIZE = {'flatten_swin_t', 'flatten_deit_t'}  # the others take any size as they are


def dynamic(name):
    """What lets a network take any size, where it is made for one."""
    return {'dynamic_img_size': True} if name in FIXED_SIZE else {}


def create_small(name, **kwargs):
    """A small network with its zero-initialised parameters away from zero, as after training."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL.get(name, SHALLOW[name]), 'num_classes': 10, **kwargs}).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(('positional_encoding', 'scale')):
                parameter.normal_(std=0.2)
    return model


def create_shallow(name, **kwargs):
    return create_small(name, **{**SHALLOW[name], **kwargs})


def seeded(name: str, **kwargs) -> torch.nn.Module:
    """A narrow and shallow ResNet, always with the same weights."""
    torch.manual_seed(0)
    return timm.create_model(name, layers=(1, 2, 2, 1), channels=(8, 16, 24, 32), **kwargs).eval()
