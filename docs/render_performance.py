"""Renders the tables of `docs/performance.md` from `benchmarks/results/`: `python docs/render_performance.py`.

A test checks that the file is current.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("performance.md")
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; numbers stand on the right."""
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def cpu_train(results: dict[str, Any]) -> str:
    """Training steps beside PyTorch's."""
    head = ["shape", "tokens/s", "PyTorch", "ratio", "PyTorch, same malloc", "ratio", "GFLOP/s", "of a product's"]
    rows = []
    for s in results["shapes"].values():
        shape = f"{s['layers']} x {s['width']}, T {s['time']}, batch {s['batch']}, vocabulary {s['vocab']:,}"
        speeds = [f"{s[key]:,.0f}" for key in ("ours_tokens_per_s", "torch_tokens_per_s", "torch_kept_tokens_per_s")]
        share = s["ours_gflop_per_s"] / s["matmul_gflop_per_s"]
        ratios = [f"{s[key]:.2f}" for key in ("ratio", "ratio_torch_kept")]
        rows.append(
            [shape, *speeds[:2], ratios[0], speeds[2], ratios[1], f"{s['ours_gflop_per_s']:.0f}", f"{share:.0%}"]
        )
    return table(head, rows)


def prepare(results: dict[str, Any]) -> str:
    """Preparation beside the tokenizer alone."""
    rows = [
        [
            f"{size['megabytes']:.0f} MB",
            f"{size['tokenizer_tokens_per_second'] / 1e6:.2f} M",
            f"{size['prepare_tokens_per_second'] / 1e6:.2f} M",
            f"{size['ratio']:.2f}",
            f"{size['prepare_peak_mb']:.0f} MB",
        ]
        for size in results["encode"]
    ]
    return table(["text", "tokenizer alone, tokens/s", "prepare, tokens/s", "ratio", "peak memory"], rows)


def nanogpt_way(results: dict[str, Any]) -> str:
    """Preparation beside nanoGPT's way."""
    ways = results["beside_nanogpt"]
    rows = []
    for name, text in (("prepare", "`meshwright prepare`"), ("nanogpt", "`datasets.map` and a memory map")):
        way = ways[name]
        sizes = [f"{way[key]:,.0f} MB" for key in ("peak_mb", "disk_mb")]
        rows.append([text, f"{way['tokens_per_second'] / 1e6:.2f} M", f"{way['seconds']:.1f}", *sizes])
    memory = ways["prepare"]["peak_mb"] / ways["nanogpt"]["peak_mb"]
    rows.append(["ratio", f"{ways['ratio']:.2f}", "", f"{memory:.2f}", f"{ways['disk_share']:.2f}"])
    what = f"{ways['megabytes']:.0f} MB of text, {ways['documents']:,} documents, {ways['tokens']:,} tokens"
    tenth = f"On a tenth of the text `prepare` takes {ways['prepare_peak_mb_of_a_tenth']:,.0f} MB of memory."
    return f"{what}:\n\n{table(['', 'tokens/s', 's', 'peak memory', 'disk'], rows)}\n\n{tenth}"


def loader(results: dict[str, Any]) -> str:
    """Batches beside a copy, and what training waits for them."""
    rates = [
        [
            f"{row['case']}, T {row['sequence_length']:,}",
            f"{row['tokens_per_second'] / 1e6:.0f} M",
            f"{row['copy_tokens_per_second'] / 1e6:.0f} M",
            f"{row['share_of_copy']:.1%}",
        ]
        for row in results["rates"]
    ]
    waits = [
        [
            case,
            f"{run['step_ms']:.1f}",
            f"{run['median_wait_ms']:.2f}",
            f"{run['longest_wait_ms']:.2f}",
            f"{run['idle_share']:.2%}",
        ]
        for case, run in results["training"].items()
    ]
    return "\n\n".join(
        [
            table(["batches of 32", "loader, tokens/s", "copy, tokens/s", "share"], rates),
            table(["training", "a step, ms", "median wait, ms", "longest wait, ms", "idle"], waits),
        ]
    )


def host_overhead(results: dict[str, Any]) -> str:
    """What a step costs the host."""
    names = {
        "loop_s": "the loop: order, reading, records, files",
        "dispatch_s": "dispatch of the step, processor time",
        "host_s": "both: the host's work in a step",
        "dispatch_by_the_clock_s": "dispatch by the clock (the device's threads share the two cores)",
        "step_in_the_loop_s": "a step in the whole loop",
        "bare_step_s": "a step with nothing around it",
    }
    return table(["", "ms"], [[text, f"{results[name] * 1e3:.2f}"] for name, text in names.items()])


def decode(results: dict[str, Any]) -> str:
    """Generation beside transformers."""
    rows = []
    for row in results["rows"]:
        speeds = [f"{row['tokens_per_second'][side]:,.1f}" for side in ("ours", "transformers")]
        rows.append([f"{row['model']}, batch {row['batch']}", *speeds, f"{row['ratio']['transformers']:.2f}"])
    return table(["model", "tokens/s", "transformers, tokens/s", "ratio"], rows)


def decode_gpu(results: dict[str, Any]) -> str:
    """Generation on a GPU beside both ways of transformers."""
    sides, rows = ("ours", "transformers", "transformers-static"), []
    for row in results["rows"]:
        shares = row["share_of_bandwidth"] or {}
        speeds = [f"{row['tokens_per_second'][side]:,.0f}" for side in sides]
        share = f"{shares['ours']:.0%}" if shares else ""
        rows.append([f"{row['model']}, batch {row['batch']}", *speeds, share])
    names = ["transformers, tokens/s", "... and its cache of fixed shape, compiled", "of the memory's bandwidth"]
    return table(["model", "tokens/s", *names], rows)


def decode_parts(results: dict[str, Any]) -> str:
    """What the products of a layer take, a token a text, in each of the ways tried."""
    rows = []
    for row in results["products"]:
        cells = [f"{us:.1f} ({row['tb_per_s'][name]:.1f})" for name, us in row["us"].items()]
        rows.append([f"{row['what']}", str(row["texts"]), *cells])
    return table(["a program's tile", "texts", *results["products"][0]["us"]], rows)


def start(results: dict[str, Any]) -> str:
    """How long a command takes to start."""
    return table(["command", "s"], [[f"`{name}`", f"{r['median_s']:.2f}"] for name, r in results["commands"].items()])


def gpu_train(results: dict[str, Any]) -> str:
    """Training on a GPU, side by side; what wasn't measured is left out."""
    names = {
        "ours": "the engine's step",
        "float8": "the engine's step, float8",
        "program": "`meshwright train`",
        "torch": "PyTorch",
        "tutorial": "tutorial's step",
    }
    rows = []
    for case, found in results["cases"].items():
        for side, figures in found["sides"].items():
            if "step_s" not in figures:
                continue
            shape = f"{case}, T {found['time']:,}, batch {found['batch']}" if ", T " not in case else case
            speed = [
                f"{figures['step_s'] * 1e3:.1f}",
                f"{figures['tokens_per_s']:,.0f}",
                f"{figures['mfu']:.1%}" if "mfu" in figures else "",
            ]
            rows.append([shape, names[side], *speed, f"{figures['last_loss']:.3f}"])
    return table(["shape", "", "a step, ms", "tokens/s", "MFU", "last loss"], rows)


def gpu_parts(results: dict[str, Any]) -> str:
    """What each part of the step on a GPU takes, and each choice gains."""
    tables = []
    for call in results["calls"]:
        rows = [
            [row["what"], f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.1%}"]
            for row in call["rows"]
        ]
        tables.append(table([call["name"], "a step, ms", "tokens/s", "MFU"], rows))
    return "\n\n".join(tables)


def gpu_kernels(results: dict[str, Any]) -> str:
    """What kernels take in each of the ways tried, and what of a step goes where."""
    kernels = table(["", "µs"], [[row["what"], f"{row['us']:,.0f}"] for row in results["rows"]])
    step = table(["a step of gpt2-124m", "ms"], [[what, f"{ms:.1f}"] for what, ms in results["of_step_ms"].items()])
    return f"{kernels}\n\n{step}"


def gpu_program(results: dict[str, Any]) -> str:
    """The whole program beside its bare step."""
    return gpu_train(results)


def gpu_torch(results: dict[str, Any]) -> str:
    """The PyTorch engine beside others' ways."""
    names = {"ours": "the engine's step", "tutorial": "tutorial's step", "trainer": "`transformers.Trainer`"}
    rows = []
    for case, sides in results["cases"].items():
        for side, name in names.items():
            if "step_s" in (figures := sides.get(side, {})):
                speed = [f"{figures['step_s'] * 1e3:.1f}", f"{figures['tokens_per_s']:,.0f}", f"{figures['mfu']:.1%}"]
                rows.append([case, name, *speed, f"{figures['peak_gib']:.1f}"])
    return table(["rows x tokens", "", "a step, ms", "tokens/s", "MFU", "peak memory, GiB"], rows)


def gpu_eight(results: dict[str, Any]) -> str:
    """A mixture of experts on several meshes, weak scaling, and a run that changes its mesh."""
    cases, tolerance = results["cases"], results["tolerance"]
    meshes, scaled = [], []
    for name, row in cases.items():
        what = name.partition(", ")[2]
        if "step_s" not in row:
            continue
        share = f"{row['mfu']:.1%}" if "mfu" in row else ""
        if name.startswith("llama"):
            speeds = [f"{row['step_s'] * 1e3:.1f}", f"{row['tokens_per_s'] / row['devices']:,.0f}", share]
            linear = results["share_of_linear"].get(name)
            scaled.append([str(row["devices"]), *speeds, "" if linear is None else f"{linear:.1%}"])
        elif ", then" not in what:
            gap = results["against_float32"].get(name)
            speeds = [f"{row['step_s'] * 1e3:.1f}", f"{row['tokens_per_s']:,.0f}", "" if "float32" in what else share]
            losses = [f"{row['losses'][-1]:.4f}", "" if gap is None else f"{gap:.4f}"]
            memory = [f"{row[key] / 2**30:.1f}" if row.get(key) else "" for key in MEMORY]
            meshes.append([what, *speeds, *losses, *memory])
    head = ["mesh", "a step, ms", "tokens/s", "MFU", "loss, last tenth", "off float32", *MEMORY.values()]
    parts = [table(head, meshes)]
    if results["largest"] is not None:
        granted = "" if tolerance is None else f", of {tolerance:.4f} granted"
        parts.append(f"Any two of them in bfloat16 differ by at most {results['largest']:.4f}{granted}.")
    if restored := results.get("restored"):
        loss, unbroken = restored["after_half"]
        parts.append(
            f"Saved on {restored['saved_on']} and restored on {restored['restored_on']}: the next loss is\n{loss:.4f}, "
            f"that of the run that went on {unbroken:.4f}; means of a tenth of the steps differ by at most\n"
            f"{restored['against_unbroken']:.4f}."
        )
    parts.append(table(["devices", "a step, ms", "tokens/s of each", "MFU", "share of linear"], scaled))
    if failed := [f"- {name}: {row['error'].splitlines()[-1]}" for name, row in cases.items() if "error" in row]:
        parts.append("Failed:\n\n" + "\n".join(failed))
    return "\n\n".join(parts)


MEMORY = {"peak_bytes": "peak, GiB", "plan_bytes": "by analysis", "xla_bytes": "by XLA's count"}


def gpu_scale(results: dict[str, Any]) -> str:
    """Steps on two cards, beside one and beside what is expected."""
    rows = []
    for name, figures in results["cases"].items():
        beside = ""
        if "share_of_linear" in figures:
            beside = f"{figures['share_of_linear']:.1%} of linear"
        elif "measured_over_expected" in figures:
            beside = f"{figures['measured_over_expected']:.2f} of {figures['expected_s'] * 1e3:.1f} ms expected"
        rows.append([name, str(figures["rows"]), f"{figures['step_s'] * 1e3:.1f}", beside])
    return table(["", "rows", "a step, ms", ""], rows)


def gpu_torch_scale(results: dict[str, Any]) -> str:
    """The PyTorch engine on two cards, beside one."""
    rows = []
    for name, figures in results["cases"].items():
        if "step_s" not in figures:
            continue
        share = f"{figures['share_of_linear']:.1%}" if "share_of_linear" in figures else ""
        step = [f"{figures['step_s'] * 1e3:.1f}", f"{figures['mfu']:.1%}", f"{figures['peak_gib']:.1f}"]
        away = f"{figures['losses_away']:.1g}" if "losses_away" in figures else ""
        rows.append([name, str(figures["rows"]), *step, share, away])
    return table(["", "rows", "a step, ms", "MFU", "peak a card, GiB", "of linear", "float32 losses away"], rows)


def gpu_float8(results: dict[str, Any]) -> str:
    """Products in float8 beside those in bfloat16."""
    return gpu_train(results)


def second_start(results: dict[str, Any]) -> str:
    """What compiling takes with the cache empty, and with what the first start left there."""
    rows = []
    for case, starts in results["cases"].items():
        for name, row in starts.items():
            seconds = [f"{row[key]:.1f}" for key in ("trace_s", "compile_s", "to_second_loss_s")]
            rows.append([f"{case}, {name} start", *seconds, str(row["programs_read"])])
    return table(["", "trace and lower, s", "compile or read, s", "to the second loss, s", "programs read"], rows)


def gpu_qlora(results: dict[str, Any]) -> str:
    """Full fine-tuning, LoRA and QLoRA side by side."""
    rows = []
    for side, name in (("full", "all parameters"), ("lora", "LoRA"), ("qlora", "QLoRA")):
        f = results["speed"][side]
        sizes = [f"{f[key]:.1f}" for key in ("start_gib", "peak_gib")]
        rows.append([name, f"{f['step_s'] * 1e3:.1f}", f"{f['tokens_per_s']:,.0f}", *sizes])
    return table(["", "a step, ms", "tokens/s", "at the start, GiB", "peak, GiB"], rows)


def ray_start(results: dict[str, Any]) -> str:
    """What starting under Ray takes, and starting again."""
    starts, found = [], results["to_first_step_s"]
    for way, name in (
        ("bare", "command to first step, bare"),
        ("ray", "... and a cluster that the command starts"),
        ("running", "... and a cluster that runs"),
    ):
        starts.append([name, f"{found[way]['median']:.1f}"])
    for worker, found in results["kill_to_first_new_step_s"].items():
        starts.append([f"kill of {worker.replace('_', ' ')} to the first new step", f"{found['median']:.1f}"])
    return table(["", "s"], starts)


def ray_overhead(results: dict[str, Any]) -> str:
    """Steps under Ray beside bare ones."""
    rows = []
    for setting, targets in results["steps_of_s"].items():
        for figures in targets.values():
            bare, again, ray = (figures[f"{way}_step_s"]["mean"] * 1e3 for way in ("bare", "bare_again", "ray"))
            differ = [_spread(figures[name]) for name in ("overhead", "bare_again_beside_bare")]
            rows.append([setting, f"{(bare + again) / 2:.1f}", f"{ray:.1f}", *differ])
    return table(["", "a step, bare, ms", "under Ray, ms", "difference", "of a second bare one"], rows)


def ray_overhead_some(results: dict[str, Any]) -> str:
    """The same of some of the settings."""
    return ray_overhead(results)


def ray_overhead_beside(results: dict[str, Any]) -> str:
    """The same, of workers that run at the same time."""
    return ray_overhead(results)


def ray_overhead_turns(results: dict[str, Any]) -> str:
    """The same, of workers that take turns."""
    return ray_overhead(results)


def ray_overhead_gpu(results: dict[str, Any]) -> str:
    """The same of a worker with a GPU."""
    return ray_overhead(results)


def _spread(found: dict[str, Any]) -> str:
    least, most = min(found["of"]), max(found["of"])
    return f"{found['mean']:+.1%} ± {found['standard_error']:.1%} ({least:+.1%} to {most:+.1%})"


def _facts(results: dict[str, Any]) -> str:
    m = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    where = f"one {m['card']}" if "card" in m else f"{m['cores']} cores ({m['cpu']})"
    if "cards" in m:
        where = f"{m['cards']} x {m['card']}"
    command = results["command"]
    what = f"`{command}`" if command.startswith("python") else command.capitalize()
    return f"{textwrap.fill(f'{what}, on {where}:', 120, break_on_hyphens=False)}\n{versions}."


MAKERS = (
    cpu_train,
    gpu_train,
    gpu_program,
    gpu_torch,
    gpu_torch_scale,
    gpu_float8,
    second_start,
    gpu_qlora,
    gpu_scale,
    gpu_parts,
    gpu_kernels,
    gpu_eight,
    prepare,
    nanogpt_way,
    loader,
    host_overhead,
    decode,
    decode_gpu,
    decode_parts,
    ray_overhead,
    ray_overhead_some,
    ray_overhead_beside,
    ray_overhead_turns,
    ray_overhead_gpu,
    ray_start,
    start,
)
"""In the order of the page."""


def render(page: str) -> str:
    """The page with its tables rendered anew."""
    for make in MAKERS:
        name = "prepare" if make is nanogpt_way else make.__name__  # the one script measures both
        path = RESULTS / f"{name}.json"
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        begin, end = (
            f"<!-- {make.__name__}: generated by docs/render_performance.py -->",
            f"<!-- end of {make.__name__} -->",
        )
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise ValueError(f"{PAGE.name}: the markers of {make.__name__!r} are missing")
        body = "\n\n".join([make(results), *_notes(results), _facts(results)]) if results else "Not measured yet."
        page = f"{before}{begin}\n\n{body}\n\n{end}{after}"
    return page


def _notes(results: dict[str, Any]) -> list[str]:
    return [textwrap.fill(results["note"], 120)] if "note" in results else []


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
