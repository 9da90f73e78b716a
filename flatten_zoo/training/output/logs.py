"""Messages of the commands, on standard error."""
import logging

from timm.utils.distributed import world_info_from_env

__all__ = ['log', 'setup_logging']

log = logging.getLogger('flatten_zoo')


def setup_logging() -> None:
    """Show the zoo's messages as they are, those of the first process only, and of the libraries' only warnings."""
    logging.basicConfig(format='%(message)s', level=logging.WARNING)
    logging.getLogger('timm.data.dataset').setLevel(logging.ERROR)  # an image it would skip is an error here
    first = world_info_from_env()[1] == 0
    log.setLevel(logging.INFO if first else logging.WARNING)
