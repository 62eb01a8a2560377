"""Pushing an export to a model hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from distill.errors import UserError


def push(folder: Path, repository: str) -> str:
    """Upload every file of an export; the repository is made, private, where it does not exist.

    Args:
        folder: an export of any format.
        repository: ``user/name``.

    Returns:
        Where it is.

    Raises:
        UserError: no such name, no token, no network or no permission.
    """
    api = HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Add drafter"))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"hub must be a repository you may write to, got {repository!r}: {first}; log in with hf auth login"
        ) from error
