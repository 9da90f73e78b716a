"""Messages of the commands, on standard error."""
import logging

__all__ = ['log', 'setup_logging']

log = logging.getLogger('flatten_zoo')


def setup_logging() -> None:
    """Show the zoo's messages as they are, and of the libraries' only warnings."""
    logging.basicConfig(format='%(message)s', level=logging.WARNING)
    logging.getLogger('timm.data.dataset').setLevel(logging.ERROR)  # an image it would skip is an error here
    log.setLevel(logging.INFO)
