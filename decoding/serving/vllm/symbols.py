"""What the plug-in rests on in vLLM, and whether a vLLM has it.

    python -m decoding.serving.vllm.symbols [FOLDER]     # of the installed vLLM, or of a package `vllm` in FOLDER

The sources are read and nothing is imported, so that looking costs a second and changes nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Runner = Literal["v1", "v2"]
KNOWN = ((0, 32), (0, 33))
"""First and last vLLM release that the plug-in was written for. Real engines ran 0.32.0 on a CPU; of 0.33.0 the symbols
were checked."""


@dataclass(frozen=True)
class Need:
    """A function, a class, or a name that a module imports."""

    module: str
    """Below `vllm`."""
    name: str
    first: str = ""
    """A function's first parameters, in order, `self` left out."""
    also: str = ""
    """Parameters that it takes besides, wherever they stand."""
    holds: str = ""
    """Attributes of a class: its own fields and methods, and what a method sets."""
    base: str = ""
    """What a class is derived from."""
    says: str = ""
    """An expression in a function's body."""


BOTH = (
    Need("config.vllm", "VllmConfig", holds="additional_config model_config parallel_config speculative_config"),
    Need(
        "config.speculative",
        "SpeculativeConfig",
        holds="method num_speculative_tokens draft_model_config draft_sample_method parallel_drafting",
    ),
    Need("config.parallel", "ParallelConfig", holds="data_parallel_size data_parallel_index"),
    Need(
        "config.model",
        "ModelConfig",
        holds="model tokenizer tokenizer_revision trust_remote_code served_model_name hf_config hf_text_config "
        "uses_mrope enable_prompt_embeds",
    ),
    Need("distributed.parallel_state", "get_tp_group"),
    Need("distributed.parallel_state", "GroupCoordinator", holds="world_size rank_in_group"),
    Need("distributed.parallel_state", "GroupCoordinator.broadcast", first="input_ src"),
    Need("model_executor.models.interfaces", "SupportsEagle3.set_aux_hidden_state_layers", first="layers"),
    Need("model_executor.models.interfaces", "EagleModelMixin", holds="aux_hidden_state_layers"),
    Need(
        "model_executor.models.interfaces",
        "EagleModelMixin._set_aux_hidden_state_layers",
        says="tuple(sorted(set(layers)))",
    ),
)
"""Of both model runners."""
V1 = (
    Need("v1.spec_decode.eagle", "EagleProposer", base="SpecDecodeBaseProposer"),
    Need("v1.spec_decode.eagle", "EagleProposer.__init__", first="vllm_config device runner"),
    Need(
        "v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.propose",
        first="num_speculative_tokens target_token_ids target_positions target_hidden_states next_token_ids "
        "token_indices_to_sample common_attn_metadata",
        says="self.num_speculative_tokens == 0",  # the head's first pass alone
    ),
    Need("v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer.load_model", first="target_model"),
    Need("v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer", holds="num_speculative_tokens"),
    Need("v1.worker.gpu_model_runner", "EagleProposer"),
    Need("v1.worker.gpu_model_runner", "GPUModelRunner", holds="requests input_batch drafter discard_request_mask"),
    Need(
        "v1.worker.gpu_model_runner",
        "GPUModelRunner._setup_eagle3_aux_hidden_state_outputs",
        says="self.model.set_aux_hidden_state_layers(aux_layers)",
    ),
    Need("v1.worker.gpu_input_batch", "InputBatch", holds="req_ids"),
    Need("v1.worker.gpu_input_batch", "CachedRequestState.get_token_id", first="idx"),
    Need("v1.attention.backend", "CommonAttentionMetadata", holds="query_start_loc"),
    Need("triton_utils.dispatcher", "register_kernels"),
    Need("v1.sample.rejection_sampler", "expand_kernel"),
    Need(
        "v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        first="x cu_num_tokens num_tokens replace_from replace_to",
    ),
)
V2 = (
    Need("v1.worker.gpu.model_runner", "init_speculator"),
    Need("v1.worker.gpu.model_runner", "GPUModelRunner.load_model", says="self.speculator.load_model(self.model)"),
    Need("v1.worker.gpu.spec_decode", "init_speculator", first="vllm_config device req_states"),
    Need("v1.worker.gpu.spec_decode.eagle.speculator", "EagleSpeculator", base="TargetDependentARSpeculator"),
    Need(
        "v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
        "TargetDependentARSpeculator.propose",
        first="input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled num_rejected",
        also="num_speculative_tokens dummy_run",
        says="num_speculative_tokens <= 1",  # the head's first pass alone
    ),
    Need("v1.worker.gpu.spec_decode.target_dependent_ar.speculator", "TargetDependentARSpeculator.load_model"),
    Need("v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator.__init__", first="vllm_config device"),
    Need(
        "v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator",
        holds="speculative_config num_speculative_steps max_num_reqs",
    ),
    Need("v1.worker.gpu.spec_decode.eagle.eagle3_utils", "get_eagle3_aux_layers_from_config", first="spec_config"),
    Need("v1.worker.gpu.spec_decode.eagle.eagle3_utils", "set_eagle3_aux_hidden_state_layers"),
    Need("model_executor.models.interfaces", "SupportsEagle3.get_eagle3_default_aux_hidden_state_layers"),
    Need("v1.worker.gpu.buffer_utils", "StagedWriteTensor", holds="gpu stage_write apply_write"),
    Need("v1.worker.gpu.buffer_utils", "StagedWriteTensor.__init__", first="size dtype device"),
    Need("v1.worker.gpu.states", "RequestState", holds="all_token_ids total_len max_num_reqs max_model_len"),
    Need("v1.worker.gpu.input_batch", "InputBatch", holds="num_reqs idx_mapping query_start_loc"),
    Need("config.speculative", "SpeculativeConfig", holds="enable_adaptive_verification"),
    Need("config.parallel", "ParallelConfig", holds="pipeline_parallel_size prefill_context_parallel_size"),
)
NEEDS: dict[Runner, tuple[Need, ...]] = {"v1": BOTH + V1, "v2": BOTH + V2}


def obstacle(runner: Runner) -> str:
    """Why the plug-in cannot work in the installed vLLM, in one line; empty where it can. Never raises."""
    try:
        import vllm

        version = str(getattr(vllm, "__version__", ""))
    except Exception as error:  # a broken installation is vLLM's to report
        return f"vLLM cannot be imported ({error})"
    if not known(version):
        first, last = (".".join(map(str, release)) for release in KNOWN)
        return f"vLLM is {version or 'of no known version'}; this plug-in knows {first} to {last}"
    lacks = missing(runner)
    return f"vLLM {version} is not as this plug-in knows it: {'; '.join(lacks)}" if lacks else ""


def known(version: str) -> bool:
    """Is it one of the releases that the plug-in was written for?"""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and KNOWN[0] <= (int(found[1]), int(found[2])) <= KNOWN[1]


def missing(runner: Runner, folder: Path | None = None) -> list[str]:
    """What the installed vLLM, or the package in `folder`, lacks of what a runner's hook rests on. Never raises."""
    try:
        if folder is None:
            spec = find_spec("vllm")
            if spec is None or not spec.submodule_search_locations:
                return ["no package vllm"]
            folder = Path(spec.submodule_search_locations[0])
        return [problem for need in NEEDS[runner] for problem in _lacking(need, folder)]
    except Exception as error:  # vLLM must start, whatever it is
        return [f"its sources cannot be read ({type(error).__name__}: {error})"]


def _lacking(need: Need, folder: Path) -> Iterator[str]:
    where = f"vllm.{need.module}.{need.name}"
    tree = _parse(folder, need.module)
    found = _find(tree, need.name.split(".")) if tree is not None else None
    if found is None:
        yield f"no {where}"
    elif isinstance(found, ast.ClassDef):
        absent = set(need.holds.split()) - set(_attributes(found))
        if absent:
            yield f"{where} has no {', '.join(sorted(absent))}"
        if need.base and need.base not in map(ast.unparse, found.bases):
            yield f"{where} is no {need.base}"
    elif isinstance(found, ast.FunctionDef):
        arguments = found.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args) if a.arg != "self"]
        first = need.first.split()
        if names[: len(first)] != first:
            yield f"{where} begins with ({', '.join(names)}), not ({', '.join(first)})"
        absent = set(need.also.split()) - {*names, *(a.arg for a in arguments.kwonlyargs)}
        if absent:
            yield f"{where} takes no {', '.join(sorted(absent))}"
        if need.says and need.says not in ast.unparse(found):
            yield f"{where} does not say `{need.says}`"


@cache
def _parse(folder: Path, module: str) -> ast.Module | None:
    path = folder.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else None


def _find(tree: ast.Module | ast.ClassDef, path: list[str]) -> ast.stmt | None:
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == path[0]:
            if len(path) == 1:
                return node
            return _find(node, path[1:]) if isinstance(node, ast.ClassDef) else None
        if isinstance(node, ast.ImportFrom) and len(path) == 1 and path[0] in [alias.name for alias in node.names]:
            return node
    return None


def _attributes(class_: ast.ClassDef) -> Iterator[str]:
    for node in class_.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
    for part in ast.walk(class_):
        targets = (
            part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
        )
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Name):
                    yield one.id
                elif isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                    yield one.attr


if __name__ == "__main__":
    package = Path(sys.argv[1]) / "vllm" if len(sys.argv) > 1 else None
    lacks = {runner: missing(runner, package) for runner in NEEDS}
    for runner, problems in lacks.items():
        print(f"{runner}: {len(NEEDS[runner])} symbols, {'all as known' if not problems else '; '.join(problems)}")
    sys.exit(any(lacks.values()))
