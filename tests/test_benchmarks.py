"""What the benchmarks compare computes the same."""

import pytest
import timm
import torch

from benchmarks.__main__ import kept, transcribed

SMALL = {
    'flatten_pvt_t': dict(img_size=64, depths=(1, 1, 1, 1), embed_dims=(16, 32, 40, 64)),
    'flatten_pvt_v2_b0': dict(img_size=64, depths=(1, 1, 1, 1)),
    'flatten_swin_t': dict(img_size=64, window_size=2, depths=(1, 1, 1, 1), embed_dim=24),
    'flatten_cswin_t': dict(img_size=64, depths=(1, 1, 1, 1), embed_dim=16, split_sizes=(1, 2, 2, 2)),
    'flatten_deit_t': dict(img_size=64, depth=1),
    **dict.fromkeys(['ea_resnet50', 'nl_resnet50', 'issa_resnet50'], dict(layers=(1, 1, 1, 1), zero_init_last=False)),
}


@pytest.mark.parametrize('name', SMALL)
def test_transcription_is_the_same_network(name):
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL[name]).double().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(('scale', 'positional_encoding')):
            torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    literal = transcribed(model)
    torch.testing.assert_close(literal(x), model(x), rtol=1e-9, atol=1e-12)
    if name.startswith('flatten'):
        assert kept(model, x, model.parameters()) < kept(literal, x, model.parameters())
