"""Publishing to the Hub."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from ..errors import UsageError, first_line
from .card import REPOSITORY
from .open import check_finite, create_model, load_model, load_weights
from .save import HUB_FILES, save_model

__all__ = ['dry_run', 'hub_folder', 'push']


@contextmanager
def hub_folder(source: Path, repo: str, *load_arguments: Any, **load_options: Any) -> Iterator[Path]:
    """A folder in timm's Hub layout: `source` itself, or what its checkpoint becomes.

    Args:
        source: Folder or checkpoint file.
        repo: `account/name` where it will go.
        *load_arguments: Of `load_model`, for a checkpoint.
        **load_options: Of `load_model` too.
    """
    check_repo(repo)
    if source.is_dir():
        yield source
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, 'model')
        save_model(load_model(source, *load_arguments, **load_options), folder, name=repo.partition('/')[2])
        yield folder


def check_folder(folder: Path, allow_non_finite: bool = False) -> None:
    """Refuse to publish what nobody could load.

    Raises:
        UsageError: The folder is not in timm's Hub layout, or its weights don't fit its configuration.
    """
    missing = [name for name in HUB_FILES if not (folder / name).is_file()]
    if missing:
        raise UsageError(f"'{folder}' has no {' and no '.join(missing)}; make such a folder with `flatten-zoo convert`")
    links = [name for name in HUB_FILES if (folder / name).is_symlink()]
    if links:  # to anything of the one who publishes
        raise UsageError(f"'{folder / links[0]}' is a link to another file; put a copy in its place")
    model = create_model(f'local-dir:{folder}')
    load_weights(model, folder / 'model.safetensors')
    if not allow_non_finite:
        check_finite(model.state_dict(), f"'{folder}'")


def dry_run(folder: Path, repo: str, private: bool = False, allow_non_finite: bool = False) -> str:
    """What `push` would send where, after the same checks of the folder and the name."""
    check_repo(repo)
    check_folder(folder, allow_non_finite)
    sizes = [f'  {name}  {(folder / name).stat().st_size / 1e6:.3f} MB' for name in HUB_FILES]
    visibility = 'private' if private else 'public, unless it exists and is private'
    return '\n'.join([f'would send to {constants.ENDPOINT}/{repo} ({visibility}):', *sizes])


def push(
    folder: str | Path, repo: str, private: bool = False, keep_card: bool = False, allow_non_finite: bool = False
) -> str:
    """Publish a folder in timm's Hub layout, in one commit, creating the repository if there is none.

    Args:
        folder: The folder. Only its README.md, config.json and model.safetensors are sent.
        repo: `account/name`.
        private: The repository must be private.
        keep_card: Leave the model card that the repository may have already.
        allow_non_finite: Publish weights that are infinite or not a number too.

    Returns:
        Address of the commit.

    Raises:
        UsageError: The folder or the name won't do, no token, or the Hub refuses or can't be reached.
    """
    folder = Path(folder)
    check_repo(repo)
    if get_token() is None:
        raise UsageError('not logged in to the Hub: run `hf auth login`, or set HF_TOKEN to a token that may write')
    check_folder(folder, allow_non_finite)
    try:
        return _upload(folder, repo, private, keep_card)
    except UsageError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as e:  # the transport's, the server's, and the client's
        cause = e.__cause__ if isinstance(e, RuntimeError) and e.__cause__ else e  # so it reports a failed upload
        refused = isinstance(cause, HfHubHTTPError) and cause.response.status_code in (401, 403)
        way_out = 'use a token that may write there' if refused else 'the same command again continues the upload'
        raise UsageError(f"could not push to '{repo}': {first_line(cause)}; {way_out}") from e


def _upload(folder: Path, repo: str, private: bool, keep_card: bool) -> str:
    api = HfApi(library_name='flatten_zoo')
    api.create_repo(repo, private=private or None, exist_ok=True)
    if private and not api.repo_info(repo).private:
        raise UsageError(f"--private: '{repo}' exists and is public; change that on the Hub or choose another name")
    files: dict[str, str | bytes] = {name: str(folder / name) for name in HUB_FILES}
    if keep_card and api.file_exists(repo, 'README.md'):
        del files['README.md']
    else:
        files['README.md'] = (folder / 'README.md').read_bytes().replace(REPOSITORY.encode(), repo.encode())
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    return api.create_commit(repo, operations, commit_message='Upload model').commit_url


def check_repo(repo: str) -> None:
    """Refuse what is no name of a repository."""
    try:
        validate_repo_id(repo)
    except HFValidationError as e:
        raise UsageError(f"--repo '{repo}': {first_line(e)}") from e
    if repo.count('/') != 1:
        raise UsageError(f"--repo '{repo}' must be account/name")
