"""The vLLM cases of `test_vllm.py`: one per process, forked from one that has imported vLLM."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
# Importing these takes as long as a case.
PRELOADED = [
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
]


def case(name: str, **given: Any) -> Any:
    """Run a function of this file in a process of its own; its result, as JSON gives it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r") as log:
        process = context.Process(target=_run, args=(name, given, log.name, sender))
        process.start()
        sender.close()
        try:
            return json.loads(receiver.recv())
        except EOFError:
            raise AssertionError(f"{name} failed:\n{log.read()[-3000:]}") from None
        finally:
            process.join()


def _run(name: str, given: dict[str, Any], log: str, result: Any) -> None:
    # vLLM then traces each graph once, without guards, as always, but does not fuse it: seconds
    # instead of minutes.
    inductor = bool(given.pop("inductor", False))
    os.environ.update(ENVIRONMENT, VLLM_CPU_CI_ENV=str(int(not inductor)))
    from vllm.model_executor.models import registry

    with open(log, "w") as out:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(out.fileno(), stream.fileno())
    # vLLM asks a class what it can do in a process that has to import vLLM again, for CUDA's sake.
    registry._run_in_subprocess = lambda ask: ask()
    result.send(json.dumps(globals()[name](given)))


def start(given: dict[str, Any], **options: Any) -> Any:
    from vllm import LLM

    if given.get("tide") is not None:
        options["additional_config"] = {"tide": given["tide"]}
    options = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32,
        "disable_log_stats": False, **options, **given.get("options", {}),
    }  # fmt: skip
    return LLM(given["model"], **options)


def decoder(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def in_waves(llm: Any, prompts: list[list[int]], new: int, wave: int = 8) -> list[list[int]]:
    """Greedy answers, the prompts arriving some at a time while others decode."""
    from vllm import SamplingParams

    engine, found, waiting, steps = llm.llm_engine, {}, list(enumerate(prompts)), 0
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    while waiting or engine.has_unfinished_requests():
        if steps % 3 == 0:
            for number, ids in waiting[:wave]:
                engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
            del waiting[:wave]
        steps += 1
        for output in engine.step():
            if output.finished:
                found[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
    return [found[number] for number in range(len(prompts))]


def watch_attention(model: Any) -> tuple[list[int], list[int]]:
    """Tokens that attend in each layer, and tokens that store KV, counted from now on."""
    attended, stored = ([0] * len(model.model.layers) for _ in range(2))
    for n, layer in enumerate(model.model.layers):
        impl = layer.self_attn.attn.impl

        def attend(*args: Any, n: int = n, forward: Any = impl.forward, **kwargs: Any) -> Any:
            attended[n] += args[5].num_actual_tokens if args[5] is not None else 0
            return forward(*args, **kwargs)

        def store(*args: Any, n: int = n, update: Any = impl.do_kv_cache_update) -> Any:
            stored[n] += len(args[-1])
            return update(*args)

        impl.forward, impl.do_kv_cache_update = attend, store
    return attended, stored


def graphs() -> int:
    """Graphs that torch has traced so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def answer(given: dict[str, Any]) -> Any:
    """Answers; with exits also their counts, and what ran as others saw it.

    Hooks see the layers if nothing is compiled; attention is seen below the compiled graphs.
    """
    llm = start(given)
    model = decoder(llm)
    seen = [0] * len(model.model.layers)
    for n, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda _, args, n=n: seen.__setitem__(n, seen[n] + len(args[0]))
        )
    attended, stored = watch_attention(model)
    histories = []
    if getattr(model, "tide", None) is not None:
        from tide.vllm.history import History

        read = History.tokens

        def seen_by_gates(*args: Any) -> Any:
            found = read(*args)
            histories.append(found.tolist())
            return found

        History.tokens = seen_by_gates  # type: ignore[method-assign]
    found: dict[str, Any] = {
        "histories": histories,
        "answers": in_waves(llm, given["prompts"], given["new"]),
    }
    found["class"] = type(model).__name__
    if getattr(model, "tide", None) is not None:
        counts = model.tide.counts
        found |= {
            "exits": model.tide.exits, "tokens": counts.tokens, "fills": counts.fills,
            "seen": seen, "attended": attended, "stored": stored, "graphs": graphs(),
            "units": 2 * len(model.tide.units.layers),  # with the model as vLLM runs it
            "payoff": model.tide.payoff and model.tide.payoff.summary(8),
            "audited": model.tide.audit.monitor.sequences if model.tide.audit.monitor else None,
        }  # fmt: skip
    names = ("vllm:num_preemptions", "vllm:spec_decode_num_accepted_tokens")
    found["metrics"] = {
        m.name: m.value for m in llm.get_metrics() if m.name in names and hasattr(m, "value")
    }
    return found


def ids(given: dict[str, Any]) -> Any:
    """Answers only; the model may run in another process."""
    return in_waves(start(given), given["prompts"], given["new"])


def drafts(given: dict[str, Any]) -> Any:
    """Answers with drafts, what was counted, and what steps were measured to cost."""
    from prometheus_client import REGISTRY
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from tide.vllm.costs import describe

    speculative = {"method": "custom_class", "model": "tide.vllm.proposer.TableProposer",
                   "num_speculative_tokens": 4}  # fmt: skip
    reject, rejects = RejectionSampler.forward, []

    def forward(self: Any, metadata: Any, *args: Any) -> Any:
        rejects.append(metadata.max_spec_len)
        return reject(self, metadata, *args)

    RejectionSampler.forward = forward
    llm = start(given, speculative_config=speculative)
    model = decoder(llm)
    answers = in_waves(llm, given["prompts"], given["new"])
    costs = getattr(model, "step_costs", None)
    drafted = "vllm:spec_decode_num_draft_tokens"
    return {
        "drafted": sum(m.value for m in llm.get_metrics() if m.name == drafted),
        "rejects": rejects,  # longest draft of each step in which drafts are accepted or not
        "answers": answers,
        "class": type(model).__name__,
        "step_costs": costs,
        "costs": costs and describe(costs),
        "counts": {
            " ".join((sample.name, *sample.labels.values())): sample.value
            for metric in REGISTRY.collect() if metric.name.startswith("tide:")
            for sample in metric.samples
        },
    }  # fmt: skip


def both_attentions(given: dict[str, Any]) -> Any:
    """Answers with half of the tokens exiting by script, for both `attention` settings."""
    from dataclasses import replace

    from tide.exits.policy import ScriptedPolicy

    llm = start(given)
    tide = decoder(llm).tide
    found = {}
    for name, share, attention in (
        ("no exits", 0.0, "subset"), ("subset", 0.5, "subset"), ("all", 0.5, "all"),
    ):  # fmt: skip
        tide.gates.script = ScriptedPolicy.share(share)
        tide.settings = replace(tide.settings, attention=attention)
        found[name] = in_waves(llm, given["prompts"], given["new"], wave=2)
    found["exits"] = tide.exits
    decoder(llm).tide = decoder(llm)._settings = None  # as without "tide"
    found["vLLM"] = in_waves(llm, given["prompts"], given["new"], wave=2)
    return found


def compiled(given: dict[str, Any]) -> Any:
    """Answers with and without exits by script, compiled, and what ran as attention saw it."""
    from tide.exits.policy import ScriptedPolicy

    llm = start(given, enforce_eager=False)
    model = decoder(llm)
    attended, stored = watch_attention(model)
    tide, found = model.tide, {}
    for name, share in (("no exits", 0.0), ("exits", 0.5)):
        tide.gates.script = ScriptedPolicy.share(share)
        found[name] = in_waves(llm, given["prompts"], given["new"], wave=2)
    counts = {"tokens": tide.counts.tokens, "fills": tide.counts.fills, "graphs": graphs()}
    return {
        **found, **counts, "attended": attended, "stored": stored,
        "folded": _folded_and_spoiled(model),
    }  # fmt: skip


def _folded_and_spoiled(model: Any) -> tuple[bool, bool]:
    """Whether one projection gives the KV of all layers; and so after it was spoiled."""
    import torch
    from vllm.forward_context import set_forward_context

    (store,), units = model.tide.units._stores, model.tide.units
    before = store.folded
    if before:
        store.project.norm = torch.nn.Identity()
        with set_forward_context(None, model._vllm_config), torch.no_grad():
            units.check(torch.arange(3), torch.randn(3, model.config.hidden_size))
    return before, store.folded


def calibration_answers(given: dict[str, Any]) -> Any:
    """The answers along which calibration collects states, and the processes that give them."""
    import psutil
    import torch

    from tide.vllm.answers import VllmAnswers

    del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    generate = VllmAnswers(given["model"], "float32", longest=640)
    assert generate._llm.llm_engine.model_config.max_model_len == 640  # vLLM starts here
    threads = torch.get_num_threads() + 1
    torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads  # vLLM has disabled setting it
    found = [generate(given["prompts"], given["new"], temperature) for temperature in (0.0, 0.7)]
    return *found, [process.name() for process in psutil.Process().children(recursive=True)]


def target_matches(given: dict[str, Any]) -> Any:
    """For each text, which of its tokens after the prompt are the target tokens of vLLM."""
    from vllm import SamplingParams

    llm = start(given)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    out = llm.generate([{"prompt_token_ids": text} for text in given["texts"]], sampling)
    found = []
    for text, start_at, output in zip(given["texts"], given["starts"], out, strict=True):
        after = range(start_at, len(text))
        found.append([output.prompt_logprobs[i][text[i]].rank == 1 for i in after])
    return found


def scripted_losses(given: dict[str, Any]) -> Any:
    """Shares of tokens that exit by a script, and the losses that the audit finds."""
    import numpy as np
    from vllm_simulation import NEVER, NEW, Draw, Served

    exits = Draw(np.random.default_rng(0), 24).exits_at(0.2)
    _, losses = Served(wave=12).serve(exits, given["audit_rate"], delta=NEVER)
    return (exits.sum(1) / NEW).tolist(), losses
