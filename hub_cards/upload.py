"""Talking to the Hub: read the existing card, upload what was laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, hf_hub_download
from huggingface_hub.errors import HTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from ..encode.quantizer import QUANTIZER_FOLDER
from ..modeling.files_elastic import PARTS_FILE
from ..models.settings import ENCODER_FILES, MODULES_FILE, SIMILARITY_FILE
from .files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, EVAL_RESULTS, RESULTS, bytes_by_file
from .onnx_graphs import QUALITY
from .training_record import RECORD_FILE


# Files that pushes generate. A push deletes those that it does not have itself; files of a person stay.
GENERATED_FILES = (
    *(RESULTS, EVAL_RESULTS, RECORD_FILE, QUALITY, MODULES_FILE, *ENCODER_FILES, SIMILARITY_FILE),
    *("config.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS),  # with both configs, a reader may take either for the model
    *("figures/heat_map_*.png", "figures/quality_*.png", "figures/variances_*.png", "figures/asymmetric_search.png"),
    *("onnx/model*.onnx", "model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors", "model.safetensors.index.json"),
    *(PARTS_FILE, f"{QUANTIZER_FOLDER}/*", "[0-9]_[A-Z]*/*"),
    *("router_config.json", "query_[0-9]_*/*", "document_[0-9]_*/*"),
)


@dataclass(frozen=True)
class Publication:
    """
    A folder with exactly the files to upload.

    Args:
        folder (`Path`): The folder.
        repo_id (`str`): The repository, `user/model`.
        left_out (`list[str]`): Files of the checkpoint that are not uploaded.
        branches (`dict[str, Path]`, *optional*): Name of a branch -> folder with exactly its files.
    """

    folder: Path
    repo_id: str
    left_out: Sequence[str]
    branches: Mapping[str, Path] = field(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        return bytes_by_file(self.folder)

    def listing(self) -> str:
        """Every file to upload with its size, also of each branch, then every other file of the checkpoint."""
        lines = []
        for name, folder in {self.repo_id: self.folder, **self.branches}.items():
            sizes = bytes_by_file(folder)
            lines.append(f"{name}: {len(sizes)} files, {sum(sizes.values()):,} bytes")
            lines += [f"{size:>15,}  {file}" for file, size in sizes.items()]
        return "\n".join([*lines, *(f"{'stays here':>15}  {file}" for file in self.left_out)])

    def upload(
        self,
        *,
        private: bool = True,
        revision: str | None = None,
        token: str | None = None,
        message: str = "Publish with m3bert",
    ) -> CommitInfo:
        """
        Create the repository if necessary, and commit the files that changed, then those of each branch. A branch has
        only these files. After an interruption, call this again to continue: files that already arrived are not sent
        twice.

        Args:
            private (`bool`, *optional*, defaults to `True`): Make a new repository private. An existing one stays as
                it is.
            revision (`str`, *optional*): Branch to commit `folder` to, which must exist. Default: `main`.
            token (`str`, *optional*): Token for the Hub. Default: that of the environment or of `hf auth login`.
            message (`str`, *optional*): Commit message.

        Raises:
            OSError: if the Hub refuses the upload or cannot be reached.
        """
        api = HfApi(token=token)
        try:
            api.create_repo(self.repo_id, private=private, exist_ok=True)
            options = {"repo_id": self.repo_id, "commit_message": message}
            commit = api.upload_folder(
                folder_path=self.folder, revision=revision, delete_patterns=list(GENERATED_FILES), **options
            )
            for name, folder in self.branches.items():
                # From the first commit: a branch of the last one would be the whole model until its own files arrive.
                first = api.list_repo_commits(self.repo_id)[-1].commit_id
                api.create_branch(self.repo_id, branch=name, revision=first, exist_ok=True)
                api.upload_folder(folder_path=folder, revision=name, delete_patterns="*", **options)
            return commit
        except (HTTPError, RuntimeError) as error:  # no connection is an HTTPError, and no OSError
            reason = " ".join(str(error).split())
            raise OSError(f"{self.repo_id} was not pushed; push again to continue. {reason}") from error


def published_card(repo_id: str, revision: str | None = None, token: str | None = None) -> str | None:
    """The existing card on the Hub, if there is one. An OSError if there may be one that cannot be read now."""
    try:
        return Path(hf_hub_download(repo_id, CARD, revision=revision, token=token)).read_text(encoding="utf-8")
    except (RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return None
