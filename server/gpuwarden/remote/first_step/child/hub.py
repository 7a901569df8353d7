"""Emulate the Hub without a network: record uploads, fake an account, and load models that the parent downloaded."""

from __future__ import annotations

import glob
import inspect
import os
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Dict

from gpuwarden.remote.first_step.child.record import Record, Stopped
from gpuwarden.remote.first_step.child.small_models import folder_of, give_weights

_WRITES = """upload_file upload_folder upload_large_folder create_commit create_branch create_tag delete_branch
    delete_tag delete_file delete_folder update_repo_settings update_repo_visibility add_collection_item
    preupload_lfs_files super_squash_history""".split()  # noqa: SIM905


def patch_hub(record: Record, module: ModuleType) -> None:
    """Patch `huggingface_hub`: record uploads and fake an account. Call this before other modules import from it."""
    api = module.HfApi

    def noted(name: str) -> Callable[..., Any]:
        shape = inspect.signature(getattr(api, name))

        def call(*args: Any, **given: Any) -> Any:
            bound = shape.bind(*args, **given).arguments
            folder = bound.get("folder_path") or bound.get("path_or_fileobj")
            if isinstance(folder, (str, os.PathLike)) and not os.path.exists(folder):
                raise ValueError(f"Provided path: '{folder}' does not exist")
            repo = str(bound.get("repo_id", ""))
            if name.startswith(("upload", "create_commit")):
                record.pushed.append(repo)
                record.at("save")
            record.replaced("uploads to the Hub", "nothing")
            done = SimpleNamespace(
                commit_url=f"https://huggingface.co/{repo}", oid="0" * 40, pr_url=None, repo_url=None,
                repo_id=repo, commit_message="", commit_description="", pr_revision=None, pr_num=None,
            )  # fmt: skip
            if not given.get("run_as_future"):
                return done
            future: Future[Any] = Future()
            future.set_result(done)
            return future

        return call

    def create_repo(self: Any, repo_id: str, **given: Any) -> Any:
        inspect.signature(created).bind(self, repo_id, **given)
        whole = repo_id if "/" in repo_id else f"me/{repo_id}"
        return module.RepoUrl(f"https://huggingface.co/{whole}")

    account = {"name": "me", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}}
    created = api.create_repo
    mine: Dict[str, Callable[..., Any]] = {name: noted(name) for name in _WRITES if hasattr(api, name)}
    mine["create_repo"] = create_repo
    mine["whoami"] = lambda self, *args, **given: account
    shared = module.hf_api.api if hasattr(module.hf_api, "api") else api()
    for name, call in mine.items():
        setattr(api, name, call)
        for place in (module, module.hf_api):
            setattr(place, name, call.__get__(shared, api))
    for name in ("login", "notebook_login", "interpreter_login", "logout"):
        setattr(module, name, lambda *args, **given: None)


def patch_models(record: Record, module: ModuleType) -> None:
    """Patch `transformers.modeling_utils`: `from_pretrained` loads a small copy, on the CPU, without quantization."""
    hub = str(record.order["hub_cache"])
    kind = module.PreTrainedModel
    original = kind.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any = None, *args: Any, **given: Any) -> Any:
        record.at("model")
        given = plain_loading(record, given)
        name = str(name)
        if not os.path.exists(name):
            if record.supply("models", name) is None:
                raise record.want("model", name)
            if not glob.glob(os.path.join(folder_of(hub, name), str(given.get("subfolder") or ""), "*.json")):
                raise Stopped(f"the config of {name} was not downloaded")
            given.pop("revision", None)
            config = given.get("config")
            for part in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))) if config else ():
                if str(getattr(part, "_attn_implementation", "")).startswith(("flash", "kernels")):
                    part._attn_implementation = "sdpa"
            give_weights(record, hub, name, str(given.get("subfolder") or ""), cls)
        return original(cls, name, *args, **given)

    kind.from_pretrained = classmethod(from_pretrained)


def patch_auto(record: Record, module: ModuleType) -> None:
    """Patch `transformers.models.auto.auto_factory`, whose `from_pretrained` runs before that of the model's class."""
    kind = module._BaseAutoModelClass
    original = kind.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **given: Any) -> Any:
        if not os.path.exists(str(name)) and record.supply("models", str(name)) is None:
            record.at("model")
            raise record.want("model", str(name))
        return original(cls, name, *args, **plain_loading(record, given))

    kind.from_pretrained = classmethod(from_pretrained)


def plain_loading(record: Record, given: Dict[str, Any]) -> Dict[str, Any]:
    """Return the `from_pretrained` arguments, except `revision` and those that need a GPU."""
    kept = dict(given)
    for name in ("quantization_config", "load_in_4bit", "load_in_8bit"):
        if kept.pop(name, None):
            record.replaced("quantization", "none")
    for name in ("device_map", "max_memory", "tp_plan", "revision"):
        kept.pop(name, None)
    if str(kept.get("attn_implementation", "")).startswith(("flash", "kernels")):
        record.replaced("flash attention", "PyTorch's attention")
        kept["attn_implementation"] = "sdpa"
    return kept
