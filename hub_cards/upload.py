"""Talking to the Hub: read the existing card, upload what was laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, hf_hub_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # no connection; not an OSError
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from modeling_m3bert.modeling_elastic import EXTRAS_FILE, EXTRAS_FOLDER
from modeling_m3bert.settings_m3bert import (
    ENCODER_FILES,
    MODULES_FILE,
    POOLING_FOLDER,
    PROJECTION_FOLDER,
    SIMILARITY_FILE,
)
from trainers.hub.quantizer import QUANTIZER_FOLDER
from trainers.hub.training_record import RECORD_FILE

from .onnx_graphs import QUALITY, SUFFIXES, graph_name


CARD, RESULTS = "README.md", "results.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft names them
EVAL_RESULTS = ".eval_results/m3bert.yaml"  # other files of this folder belong to other people
# Files that every push generates. A push deletes those that it does not have itself; files of a person stay.
GENERATED_FILES = (
    RESULTS,
    EVAL_RESULTS,
    RECORD_FILE,
    *("config.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS),  # with both configs, a reader may take either for the model
    "figures/heat_map_*.png",
    "figures/quality_and_*.png",
    "figures/quality_by_code.png",
    "figures/variances_*.png",
    *(graph_name(weights=weights) for weights in SUFFIXES),
    "onnx/model_[0-9]*x[0-9]*.onnx",
    QUALITY,
    "model.safetensors",
    "model-[0-9]*-of-[0-9]*.safetensors",
    "model.safetensors.index.json",
    f"{QUANTIZER_FOLDER}/*",
    f"{EXTRAS_FOLDER}/{EXTRAS_FILE}",
    *("router_config.json", "query_[0-9]_*/*", "document_[0-9]_*/*"),
    *(MODULES_FILE, *ENCODER_FILES, SIMILARITY_FILE, f"{POOLING_FOLDER}/*", f"{PROJECTION_FOLDER}/*"),
)


@dataclass(frozen=True)
class Publication:
    """
    A folder with exactly the files to upload.

    Args:
        folder (`Path`): The folder.
        repo_id (`str`): The repository, `user/model`.
        left_out (`dict[str, str]`): File of the checkpoint that is not uploaded -> the reason.
    """

    folder: Path
    repo_id: str
    left_out: Mapping[str, str]

    def sizes(self) -> dict[str, int]:
        """File -> bytes."""
        files = sorted(file for file in self.folder.rglob("*") if file.is_file())
        return {file.relative_to(self.folder).as_posix(): file.stat().st_size for file in files}

    def listing(self) -> str:
        """Every file to upload with its size, then every other file of the checkpoint with the reason."""
        sizes = self.sizes()
        lines = [f"{self.repo_id}: {len(sizes)} files, {sum(sizes.values()):,} bytes"]
        lines += [f"{size:>15,}  {name}" for name, size in sizes.items()]
        lines += [f"{'stays here':>15}  {name}: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)

    def upload(
        self,
        *,
        private: bool = True,
        revision: str | None = None,
        token: str | None = None,
        message: str = "Publish with m3bert",
    ) -> CommitInfo:
        """
        Create the repository if necessary, and commit the files that changed. After an interruption, call this again
        to continue: files that already arrived are not sent twice.

        Args:
            private (`bool`, *optional*, defaults to `True`): Make a new repository private. An existing one stays as
                it is.
            revision (`str`, *optional*): Branch, which must exist. Default: `main`.
            token (`str`, *optional*): Token for the Hub. Default: that of the environment or of `hf auth login`.
            message (`str`, *optional*): Commit message.

        Raises:
            OSError: if the Hub refuses the upload or cannot be reached; the text says what to do.
        """
        api = HfApi(token=token)
        try:
            api.create_repo(self.repo_id, private=private, exist_ok=True)
            return api.upload_folder(
                repo_id=self.repo_id,
                folder_path=self.folder,
                revision=revision,
                commit_message=message,
                delete_patterns=list(GENERATED_FILES),
            )
        except (HTTPError, OSError, RuntimeError, ValueError) as error:  # the client raises all of these
            raise OSError(explain(error, self.repo_id, revision)) from error


def published_card(repo_id: str, revision: str | None = None, token: str | None = None) -> str | None:
    """
    The existing card on the Hub, if there is one.

    Raises:
        OSError: if there may be a card but it cannot be read: a new one would overwrite a person's edits.
    """
    try:
        file = hf_hub_download(repo_id, CARD, revision=revision, token=token)
    except LocalEntryNotFoundError as error:  # no connection, or a server error
        raise OSError(f"The card of {repo_id} on the Hub cannot be read now: try again later.") from error
    except (RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return None
    except HfHubHTTPError as error:
        raise OSError(explain(error, repo_id, revision)) from error
    return Path(file).read_text(encoding="utf-8")


def explain(error: BaseException, repo_id: str, revision: str | None) -> str:
    """One line: why the Hub refused and what to do about it. It never holds a token, a header or a signed URL."""
    if isinstance(error, ValueError):  # from the storage of large files
        return f"The Hub refused {repo_id}: {str(error).splitlines()[-1]}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__ or cause.__context__
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
    if status in (413, 507):
        return (
            f"The Hub has no room for {repo_id} ({status}): free some space, or publish a smaller granularity "
            "(Options.granularity)."
        )
    if status is None or isinstance(error, RuntimeError):  # a file was on its way
        return (
            f"The upload to {repo_id} was interrupted ({type(cause or error).__name__}); "
            "push again to continue where it stopped."
        )
    if isinstance(cause, RevisionNotFoundError):
        return f"{repo_id} has no branch {revision!r} on the Hub: create it first."
    if status == 401:
        return "The Hub does not know this token (401): log in with `hf auth login`, or set HF_TOKEN."
    if status == 403:
        return f"The token may not write to {repo_id} (403): use one with write access to it."
    if status == 404:
        return f"There is no repository {repo_id} on the Hub, or the token may not see it (404)."
    return f"The Hub refused {repo_id} with status {status}; push again to continue where it stopped."
