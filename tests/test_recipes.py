"""The recipes in configs/: what the project's own parser and builders make of them, against the authors' settings."""

import json
import math
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.auto_augment import RandAugment
from timm.data.transforms import RandomResizedCropAndInterpolation
from timm.layers import DropPath, resample_abs_pos_embed_nhwc, resize_rel_pos_bias_table
from timm.models import create_model
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import Dataset
from torchvision.transforms import Compose, InterpolationMode

from flatten_zoo.errors import UsageError
from flatten_zoo.training.data.loaders import input_config, training_loader
from flatten_zoo.training.loop.model import build_training_model
from flatten_zoo.training.loop.optimization import (
    Numerics,
    Settled,
    build_optimizer,
    build_scheduler,
    build_task,
    mixup_arguments,
    updates_per_epoch,
)
from flatten_zoo.training.options.checks import check_train_options
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.weights.official_names import family_of
from flatten_zoo.weights.open import load_weights

CONFIGS = Path(__file__).parents[1] / 'configs'
REFERENCE = Path(__file__).parent / 'reference'
PROCESSES = 8
IMAGES = 1_281_167  # ImageNet-1K
CPU = torch.device('cpu')

# The authors' settings; the rates are those before scaling by (images of all GPUs) / 512.
COLUMNS = (
    'batch',
    'weight_decay',
    'epochs',
    'warmup',
    'cooldown',
    'lr',
    'warmup_lr',
    'min_lr',
    'clip',
    'ema',
    'drop_path',
    'size',
    'resized',
)
TABLE = {
    'flatten_pvt_t': (128, 0.05, 300, 5, 10, 5e-4, 1e-6, 1e-5, None, None, 0.1, 224, 256),
    'flatten_pvt_s': (64, 0.05, 300, 5, 10, 5e-4, 1e-6, 1e-5, None, None, 0.1, 224, 256),
    'flatten_pvt_m': (64, 0.05, 300, 5, 10, 5e-4, 1e-6, 1e-5, 1.0, None, 0.3, 224, 256),
    'flatten_pvt_b': (32, 0.05, 300, 5, 10, 5e-4, 1e-6, 1e-5, 1.0, None, 0.3, 224, 256),
    'flatten_pvt_v2_b0': (128, 0.05, 300, 5, 10, 5e-4, 1e-6, 1e-5, None, None, 0.1, 224, 256),
    'flatten_pvt_v2_b1': (128, 0.05, 300, 5, 10, 5e-4, 1e-6, 1e-5, None, None, 0.1, 224, 256),
    'flatten_pvt_v2_b2': (128, 0.05, 300, 5, 10, 5e-4, 1e-6, 1e-5, None, None, 0.1, 224, 256),
    'flatten_pvt_v2_b3': (128, 0.05, 300, 5, 10, 5e-4, 1e-6, 1e-5, 1.0, None, 0.3, 224, 256),
    'flatten_pvt_v2_b4': (64, 0.05, 300, 5, 10, 5e-4, 1e-6, 1e-5, 1.0, None, 0.3, 224, 256),
    'flatten_swin_t': (128, 0.05, 300, 20, 0, 5e-4, 5e-7, 5e-6, 5.0, None, 0.2, 224, 256),
    'flatten_swin_s': (128, 0.05, 300, 20, 0, 5e-4, 5e-7, 5e-6, 5.0, None, 0.3, 224, 256),
    'flatten_swin_b': (64, 0.05, 300, 20, 0, 5e-4, 5e-7, 5e-6, 5.0, None, 0.5, 224, 256),
    'flatten_cswin_t': (256, 0.05, 300, 20, 10, 5e-4, 1e-6, 1e-5, None, 0.99984, 0.2, 224, 256),
    'flatten_cswin_s': (128, 0.05, 300, 20, 10, 5e-4, 1e-6, 1e-5, None, 0.99984, 0.4, 224, 256),
    'flatten_cswin_b': (64, 0.1, 300, 20, 10, 5e-4, 1e-6, 1e-5, None, 0.99982, 0.5, 224, 256),
    'flatten_swin_b_384': (32, 1e-8, 30, 5, 0, 2e-5, 2e-8, 2e-7, 5.0, None, 0.5, 384, 384),
    'flatten_cswin_b_384': (32, 1e-8, 20, 0, 10, 5e-6, 5e-6, 5e-7, None, 0.99982, 0.7, 384, 438),
}
# Learning rates worked out by hand: (epochs into the run, rate).
BY_HAND = {
    'flatten_pvt_t': [(0, 2e-6), (2.5, 5.01e-4), (150, 5.1e-4), (300, 2e-5), (309, 2e-5)],
    'flatten_swin_b': [(0, 5e-7), (10, 2.5025e-4), (150, 2.525e-4), (300, 5e-6)],
    'flatten_cswin_t': [(0, 4e-6), (10, 1.002e-3), (150, 1.02e-3), (305, 4e-5)],
    'flatten_swin_b_384': [(0, 1e-8), (2.5, 5.005e-6), (15, 5.05e-6), (30, 1e-7)],
    'flatten_cswin_b_384': [(0, 2.5e-6), (10, 1.375e-6), (20, 2.5e-7), (29, 2.5e-7)],
}


class Images(Dataset):
    """As many images as ImageNet-1K has, none of which can be looked at."""

    transform = None

    def __len__(self):
        return IMAGES


@contextmanager
def eight_processes():
    """Within, this process is the first of 8, of which the others are made up."""
    torch.distributed.init_process_group('fake', rank=0, world_size=PROCESSES, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class Recipe:
    """What training builds from a recipe in the first of 8 processes; tensors have shapes only."""

    def __init__(self, name: str):
        args = train_parser().parse_with_config(['--config', str(CONFIGS / f'{name}.yaml')])
        check_train_options(args)
        self.args = args.replace(workers=0, model_kwargs={'device': 'meta'})
        self.model = build_training_model(self.args)
        config = input_config(self.args, self.model)
        with eight_processes():
            self.lr = Settled.from_options(self.args, self.model.num_classes).lr
            self.optimizer = build_optimizer(self.args, self.model, self.lr)
            self.loader = training_loader(self.args, 1000, Images(), config, Numerics(CPU))
        self.updates = updates_per_epoch(self.args, len(self.loader))
        self.scheduler, self.epochs = build_scheduler(self.args, self.optimizer, self.updates, start=0)

    def rate(self, epoch: float) -> float:
        """The learning rate after so many epochs."""
        update = round(epoch * self.updates)
        self.scheduler.step(update // self.updates)
        self.scheduler.step_update(update)
        rates = {group['lr'] for group in self.optimizer.param_groups}
        assert len(rates) == 1
        return rates.pop()

    def weight_decays(self) -> dict[str, float]:
        by_parameter = {p: g['weight_decay'] for g in self.optimizer.param_groups for p in g['params']}
        return {name: by_parameter[parameter] for name, parameter in self.model.named_parameters()}


@pytest.fixture(scope='module')
def recipes():
    built = {}

    def recipe(name: str) -> Recipe:
        if name not in built:
            built[name] = Recipe(name)
        return built[name]

    return recipe


def table(name: str) -> dict:
    return dict(zip(COLUMNS, TABLE[name], strict=True))


def test_every_official_recipe_is_here():
    official = {path.stem for path in CONFIGS.glob('flatten_*.yaml')}
    assert official == set(TABLE)


@pytest.mark.parametrize('name', TABLE)
def test_optimizer_and_schedule(recipes, name):
    recipe, expected = recipes(name), table(name)
    scale = PROCESSES * expected['batch'] / 512
    lr, warmup_lr, min_lr = (scale * expected[key] for key in ('lr', 'warmup_lr', 'min_lr'))
    assert recipe.args.model == name
    assert recipe.args.batch_size == expected['batch']
    assert type(recipe.optimizer) is torch.optim.AdamW
    assert tuple(recipe.optimizer.defaults['betas']) == (0.9, 0.999)
    assert recipe.optimizer.defaults['eps'] == 1e-8
    assert (recipe.lr, recipe.args.warmup_lr, recipe.args.min_lr) == pytest.approx((lr, warmup_lr, min_lr))
    assert (recipe.args.clip_grad, recipe.args.clip_mode) == (expected['clip'], 'norm')
    assert recipe.epochs == expected['epochs'] + expected['cooldown']
    for epoch in (0, 1, 4.5, 5, 12, 19.5, 20, expected['epochs'] / 3, expected['epochs'], recipe.epochs - 0.5):
        if epoch < expected['warmup']:
            value = warmup_lr + (lr - warmup_lr) * epoch / expected['warmup']
        else:
            part = min(epoch / expected['epochs'], 1)
            value = min_lr + (lr - min_lr) * (1 + math.cos(math.pi * part)) / 2
        # an epoch has a whole number of updates, so a part of an epoch is one only to the nearest update
        assert recipe.rate(epoch) == pytest.approx(value, rel=2e-3 if epoch % 1 else 1e-9)


@pytest.mark.parametrize('name', BY_HAND)
def test_rates_worked_out_by_hand(recipes, name):
    recipe = recipes(name)
    assert [recipe.rate(epoch) for epoch, _ in BY_HAND[name]] == pytest.approx(
        [rate for _, rate in BY_HAND[name]], rel=1e-3
    )


def test_rate_changes_with_every_update(recipes):
    recipe = recipes('flatten_swin_t')
    rates = [recipe.rate(100 + update / recipe.updates) for update in range(4)]
    assert sorted(set(rates), reverse=True) == rates


@pytest.mark.parametrize('name', TABLE)
def test_drop_path_average_and_evaluation(recipes, name):
    recipe, expected = recipes(name), table(name)
    rates = [module.drop_prob for module in recipe.model.modules() if isinstance(module, DropPath)]
    blocks = len({id(m) for m in recipe.model.modules() if hasattr(m, 'norm1') and hasattr(m, 'mlp')})
    linear = torch.linspace(0, expected['drop_path'], blocks)[1:]
    assert sorted(set(rates)) == pytest.approx(linear.tolist())
    ema = build_task(recipe.args, nn.Linear(1, 1), CPU).trainable_module_ema if recipe.args.model_ema else None
    assert (ema and ema.decay) == expected['ema']
    assert ema is None or not ema.use_warmup
    config = input_config(recipe.args, recipe.model)
    assert config['input_size'] == (3, expected['size'], expected['size'])
    assert (config['crop_mode'], config['interpolation']) == ('squash', 'bicubic')
    resize = create_transform(**config).transforms[0]
    assert resize.size == (expected['resized'],) * 2  # both sides: the aspect ratio is not kept
    assert (config['mean'], config['std']) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize('name', TABLE)
def test_augmentation(recipes, name):
    recipe, expected = recipes(name), table(name)
    loader = recipe.loader
    assert len(loader) == IMAGES // (PROCESSES * expected['batch'])
    crop, flip, augment, *rest = loader.dataset.transform.transforms
    assert isinstance(crop, RandomResizedCropAndInterpolation)
    assert (crop.size, crop.scale, crop.ratio) == ((expected['size'],) * 2, (0.08, 1.0), (3 / 4, 4 / 3))
    assert crop.interpolation == InterpolationMode.BICUBIC
    assert flip.p == 0.5
    assert isinstance(augment, RandAugment)
    assert augment.num_layers == 2
    assert all(op.magnitude == 9 and op.magnitude_std == 0.5 for op in augment.ops)
    assert {'PosterizeIncreasing', 'SolarizeIncreasing'} <= {op.name for op in augment.ops}
    assert len(rest) == 1  # to a tensor: RandAugment takes the place of colour jitter, for the authors as well
    erasing = loader.random_erasing
    assert (erasing.probability, erasing.per_pixel, erasing.min_count, erasing.max_count) == (0.25, True, 1, 1)
    assert mixup_arguments(recipe.args, 1000) == {
        'mixup_alpha': 0.8,
        'cutmix_alpha': 1.0,
        'cutmix_minmax': None,
        'prob': 1.0,
        'switch_prob': 0.5,
        'mode': 'batch',
        'label_smoothing': 0.1,
        'num_classes': 1000,
    }


def operations(owner) -> list[auto_augment.AugmentOp]:
    """timm's operations of augmentation in what holds them: a data set, transforms, policies."""
    if isinstance(owner, auto_augment.AugmentOp):
        return [owner]
    if isinstance(owner, Dataset | Compose | RandAugment | auto_augment.AutoAugment | auto_augment.AugMixAugment):
        owner = list(vars(owner).values())
    return [op for item in owner for op in operations(item)] if isinstance(owner, list | tuple) else []


@pytest.mark.parametrize(
    'options',
    [
        '--aa rand-m9-mstd0.5-inc1',
        '--aa rand-m9',
        '--aa original',
        '--aa v0',
        '--aa augmix-m5-w4-d2',
        '--aa rand-m9-inc1 --aug-splits 2',
        '--aa rand-m9-inc1 --train-img-sizes 32 64',
    ],
)
def test_strongest_posterize_leaves_a_black_image(options):
    table = dict(auto_augment.NAME_TO_OP)
    args = train_parser().parse_args([*options.split(), '-j', '0', '--img-size', '32', '-b', '1024'])
    loader = training_loader(args, 10, Images(), input_config(args, create_model('test_resnet')), Numerics(CPU))
    found = [op for op in operations(loader.dataset) if op.name.startswith('Posterize')]
    assert found
    image = Image.new('RGB', (2, 2), (255, 128, 90))
    for op in found:
        for bits, colour in ((0, (0, 0, 0)), (1, (128, 128, 0)), (4, (240, 128, 80))):
            assert op.aug_fn(image, bits).getpixel((0, 0)) == colour
    assert auto_augment.NAME_TO_OP == table
    assert table['Posterize'] is auto_augment.posterize  # the loader has changed its own alone


@pytest.mark.parametrize('name', TABLE)
def test_weight_decay(recipes, name):
    recipe = recipes(name)
    decays = recipe.weight_decays()
    assert set(decays.values()) == {0, table(name)['weight_decay']}
    for key, parameter in recipe.model.named_parameters():
        exempt = parameter.ndim == 1 or key.endswith(('.bias', 'relative_position_bias_table'))
        assert (decays[key] == 0) == exempt, key
    decayed = {key.rpartition('.')[2] for key in decays if decays[key]}
    assert {'weight', 'scale', 'positional_encoding'} <= decayed


@pytest.mark.parametrize('name', [name for name in TABLE if (REFERENCE / f'{name}.json').exists()])
def test_weight_decay_is_that_of_the_official_tensors(recipes, name):
    """The authors' rule on the official names and shapes, carried over to the zoo's by its own conversion."""
    recipe = recipes(name)
    state = json.loads((REFERENCE / f'{name}.json').read_text())['state_dict']
    marks = {}
    for key, shape in dict(state).items():
        exempt = len(shape) == 1 or key.endswith('.bias') or 'relative_position_bias_table' in key
        marks[key] = torch.tensor(0.0 if exempt else 1.0).expand(shape)
    converted = family_of(recipe.model).checkpoint_filter_fn(marks, recipe.model)
    for key, decay in recipe.weight_decays().items():
        assert converted[key].unique().tolist() == [float(decay > 0)], key


def test_attention_resnets_have_timms_a3(recipes):
    recipe = recipes('attention_resnet_a3')
    args = recipe.args
    assert (args.batch_size, args.opt, recipe.lr, args.weight_decay) == (256, 'lamb', 8e-3, 0.02)
    assert (args.warmup_lr, args.min_lr, recipe.epochs, args.drop_path) == (1e-4, 1e-6, 100, None)
    assert [recipe.rate(epoch) for epoch in (0, 1, 5, 50, 99)] == pytest.approx(
        [1e-4, 1.68e-3, 7.951e-3, 4.0005e-3, 2.973e-6], rel=1e-3
    )
    config = input_config(args, recipe.model)
    assert (config['input_size'], config['crop_pct'], config['interpolation']) == ((3, 160, 160), 0.95, 'bicubic')
    augment = recipe.loader.dataset.transform.transforms[2]
    assert all(op.magnitude == 6 and op.magnitude_std == 0.5 for op in augment.ops)
    mixing = mixup_arguments(args, 1000)
    assert (mixing['mixup_alpha'], mixing['cutmix_alpha'], mixing['label_smoothing']) == (0.1, 1.0, 0)
    criterion = build_task(args, nn.Linear(1, 1), CPU).criterion
    assert type(criterion).__name__ == 'BinaryCrossEntropy'
    assert (criterion.target_threshold, criterion.smoothing) == (0.2, 0)
    for key, parameter in recipe.model.named_parameters():
        assert (recipe.weight_decays()[key] == 0) == (parameter.ndim == 1), key


# From 224 to 384


@pytest.mark.parametrize('name', ['flatten_swin_b_384', 'flatten_cswin_b_384'])
def test_larger_recipes_start_where_the_smaller_ones_end(recipes, name):
    smaller = recipes(name.removesuffix('_384')).args
    assert recipes(name).args.initial_checkpoint == f'output/train/{smaller.experiment}/model_best.pth.tar'


SMALL = {
    'flatten_swin_t': ({'img_size': 64, 'window_size': 2}, {'img_size': 96, 'window_size': 3}),
    'flatten_cswin_t': ({'img_size': 64}, {'img_size': 96}),
    'flatten_pvt_t': ({'img_size': 32}, {'img_size': 64}),
}
RESAMPLED = {
    'flatten_swin_t': {'positional_encoding', 'relative_position_bias_table'},
    'flatten_cswin_t': {'positional_encoding'},
    'flatten_pvt_t': {'positional_encoding', 'pos_embed'},
}
NARROW = {
    'flatten_swin_t': {'embed_dim': 8, 'depths': (1, 1, 2, 1), 'num_heads': (1, 1, 2, 2)},
    'flatten_cswin_t': {'embed_dim': 8, 'depths': (1, 1, 2, 1), 'num_heads': (1, 1, 2, 2)},
    'flatten_pvt_t': {'embed_dims': (8, 8, 8, 8), 'num_heads': (1, 1, 1, 1), 'depths': (1, 1, 1, 1)},
}


def small_model(name: str, large: bool) -> nn.Module:
    torch.manual_seed(int(large))
    model = create_model(name, num_classes=5, **NARROW[name], **SMALL[name][large])
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize('official', [False, True])
@pytest.mark.parametrize('name', SMALL)
def test_positions_of_a_smaller_image_size_are_resampled(tmp_path, name, official):
    source, target = small_model(name, large=False), small_model(name, large=True)
    state = source.state_dict()
    torch.save({'model': family_of(source).official_state_dict(state) if official else state}, tmp_path / 'small.pth')
    load_weights(target, tmp_path / 'small.pth', use_ema=None, adapt=True)
    resampled = set()
    for key, value in target.state_dict().items():
        expected = state[key]
        if value.shape != expected.shape:
            resampled.add(key.rpartition('.')[2])
            if key.endswith('relative_position_bias_table'):
                expected = resize_rel_pos_bias_table(expected, (3, 3), value.shape)
            else:
                expected = resample_abs_pos_embed_nhwc(expected, value.shape[1:3])
        assert torch.equal(value, expected), key
    assert resampled == RESAMPLED[name]
    size = SMALL[name][1]['img_size']
    assert target.eval()(torch.zeros(1, 3, size, size)).isfinite().all()


def test_only_training_adapts(tmp_path):
    source, target = small_model('flatten_pvt_t', large=False), small_model('flatten_pvt_t', large=True)
    torch.save(source.state_dict(), tmp_path / 'small.pth')
    with pytest.raises(UsageError, match='of another shape'):
        load_weights(target, tmp_path / 'small.pth', use_ema=None)


@pytest.mark.parametrize('name', ['flatten_swin_t', 'flatten_cswin_t', 'ea_resnet50', 'test_resnet', 'test_vit'])
def test_checkpoints_of_another_architecture_are_refused(tmp_path, name):
    path = tmp_path / 'other.pth'
    torch.save(small_model('flatten_pvt_t', large=False).state_dict(), path)
    with pytest.raises(UsageError, match='does not fit the model .* tensors missing'):
        load_weights(create_model(name, **NARROW.get(name, {})), path, use_ema=None, adapt=True)
