"""A plugin of mypy: what a network keeps under a name that its class does not declare may be anything.

torch says `Tensor | Module`; timm's networks keep numbers, configurations and functions there too.
"""

from mypy.plugin import Plugin
from mypy.types import AnyType, TypeOfAny, UnionType


class ModuleAttributes(Plugin):
    def get_attribute_hook(self, fullname):
        if fullname.startswith('torch.nn.modules.module.Module.'):
            return lambda found: (
                AnyType(TypeOfAny.special_form)
                if isinstance(found.default_attr_type, UnionType)
                else found.default_attr_type
            )
        return None


def plugin(version):
    return ModuleAttributes
