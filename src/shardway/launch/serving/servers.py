"""The contract of an inference server (group `shardway.inference_servers`), and ours: vLLM, SGLang, transformers.

Invariants:
- No secret stands in a word of a server's command: `ps` shows those to every user of a node.
- A server that checks no key listens on the loopback address alone.
- Nothing of a server is imported here; what is needed is looked for in the environment of the job.

Sources: `vllm serve --help` and docs.vllm.ai "Security" (a key protects /v1 and a few other prefixes, and not
/invocations); docs.sglang.io "Server Arguments" (`--config`: a YAML file of options); `transformers serve --help`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

PORT, HOST, KEY, KEY_FILE = "{port}", "{host}", "{key}", "{key_file}"
"""What the job fills in: the port that it finds, the address, the key that it makes, the file of `key_config`."""


@dataclass(frozen=True)
class ServedModel:
    """What a server is started with. `path`: a folder, or a hub's name; `name`: what requests call it; `tp`: the
    degree of tensor parallelism; `options`: the user's own words."""

    path: str
    name: str
    tp: int = 1
    on_cpu: bool = False
    options: tuple[str, ...] = ()


class InferenceServer(ABC):
    """One server with the API of OpenAI. A class of another package that derives from this one and has an entry
    point in the group `shardway.inference_servers` can be named in `shardway submit --serve`. It is
    made without arguments."""

    module: ClassVar[str] = ""
    """The Python package that the environment of the job needs; "" for a server that is none."""
    install: ClassVar[str] = ""
    """How that package is installed."""
    health: ClassVar[str] = "/health"
    """The path that answers 200 when requests can be answered."""
    own_options: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Options that `words` sets, each with what the user names in its place ("" for nothing)."""
    key_variable: ClassVar[str] = ""
    """The environment variable from which it reads its API key."""
    key_config: ClassVar[str] = ""
    """The text of a file, with `{key}`, from which it reads its API key; `words` names that file as `{key_file}`."""
    splits: ClassVar[bool] = True
    """Whether it knows tensor parallelism."""

    @property
    def checks_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self.key_variable or self.key_config)

    @abstractmethod
    def words(self, model: ServedModel) -> tuple[str, ...]:
        """Its command, with `{port}` and `{host}` where the job puts them. "python3" is that of the job."""

    def environment(self, model: ServedModel) -> dict[str, str]:
        """Variables that it needs; those that the job has already stay."""
        return {}

    def request_name(self, model: ServedModel) -> str:
        """What the field "model" of a request holds."""
        return model.name


class VllmServer(InferenceServer):
    """`vllm serve`."""

    module = "vllm"
    install = "pip install vllm"
    key_variable = "VLLM_API_KEY"
    own_options = MappingProxyType(
        {
            "--port": "--port",
            "--host": "--expose",
            "--uds": "",
            "--api-key": "",
            "--model": "the word after --serve vllm",
            "--served-model-name": "--model-name",
            "--tensor-parallel-size": "--tp",
            "-tp": "--tp",
        }
    )

    def words(self, model: ServedModel) -> tuple[str, ...]:
        command = ("python3", "-m", "vllm.entrypoints.cli.main", "serve", model.path, "--served-model-name", model.name)
        place = ("--host", HOST, "--port", PORT, "--tensor-parallel-size", str(model.tp))
        return (*command, *place, *model.options)

    def environment(self, model: ServedModel) -> dict[str, str]:
        """It reports how it is used over the network, which nodes often lack, and takes a port of its own by itself."""
        return {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class SglangServer(InferenceServer):
    """`python -m sglang.launch_server`."""

    module = "sglang"
    install = "pip install sglang"
    key_config = "api-key: {key}\n"
    own_options = MappingProxyType(
        {
            "--port": "--port",
            "--host": "--expose",
            "--api-key": "",
            "--config": "",
            "--model-path": "the word after --serve sglang",
            "--model": "the word after --serve sglang",
            "--served-model-name": "--model-name",
            "--tensor-parallel-size": "--tp",
            "--tp-size": "--tp",
            "--tp": "--tp",
        }
    )

    def words(self, model: ServedModel) -> tuple[str, ...]:
        command = ("python3", "-m", "sglang.launch_server", "--model-path", model.path)
        named = ("--served-model-name", model.name, "--host", HOST, "--port", PORT, "--tp-size", str(model.tp))
        device = ("--device", "cpu") if model.on_cpu and "--device" not in model.options else ()
        return (*command, *named, "--config", KEY_FILE, *device, *model.options)


class TransformersServer(InferenceServer):
    """`transformers serve`: checks no key, knows no tensor parallelism, and calls a model by its path."""

    module = "transformers"
    install = "pip install 'transformers[serving]'"
    splits = False
    own_options = MappingProxyType({"--port": "--port", "--host": ""})

    def words(self, model: ServedModel) -> tuple[str, ...]:
        command = ("python3", "-m", "transformers.cli.transformers", "serve", model.path)
        return (*command, "--host", HOST, "--port", PORT, *model.options)

    def request_name(self, model: ServedModel) -> str:
        """The path: it has no option for another name."""
        return model.path
