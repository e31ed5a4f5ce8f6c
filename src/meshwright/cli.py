"""The commands: parse, call, print. Each imports what it needs when it runs, so that `--help` is quick."""

import shlex
import sys
from typing import Any

import click

RUN_FILE = click.argument("run_file", metavar="RUN.toml")
RUN_DIR = click.argument("run_dir", metavar="RUN_DIR")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
CHECKPOINT = click.option(
    "--checkpoint", default="newest", show_default=True, metavar="WHICH", help="newest, best, or a step."
)


class _Group(click.Group):
    """Shows a user's mistake, or a file that can't be used, as its line."""

    def invoke(self, ctx: click.Context) -> Any:
        from meshwright.errors import UserError

        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)
        except OSError as error:
            click.echo(f"error: {error.filename or 'file'}: {error.strerror or error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="meshwright", prog_name="meshwright")
def main() -> None:
    """Pretrain and fine-tune language models from one run file.

    \b
    Example:
      meshwright train examples/stdlib.toml
    """


@main.command()
@RUN_FILE
@OVERRIDES
def prepare(run_file: str, overrides: tuple[str, ...]) -> None:
    """Turn the text of a run file into its token store.

    `train` does this by itself where it is needed.

    \b
    Example:
      meshwright prepare examples/stdlib.toml tokenizer.vocab_size=2048
    """
    from meshwright.api import prepare
    from meshwright.config import load_run

    for store in prepare(load_run(run_file, overrides)).stores:
        click.echo(f"store: {store.path}")
        for name in ("train", "validation"):
            split = store.split(name)
            click.echo(f"  {name:<10}  {split.token_count:>14,} tokens")
    click.echo(f"next: {shlex.join(['meshwright', 'train', run_file, *overrides])}")


@main.command()
@RUN_FILE
@OVERRIDES
@click.option("--show", "count", type=click.IntRange(min=1), default=3, show_default=True, help="How many examples.")
@click.option("--split", type=click.Choice(["train", "validation"]), default="train", show_default=True)
def data(run_file: str, overrides: tuple[str, ...], count: int, split: str) -> None:
    """Show the first examples as the model will see them; prepares the data if needed.

    What isn't learned is dim on a terminal, and between ⟦ and ⟧ on a pipe.

    \b
    Example:
      meshwright data examples/stdlib.toml --show 3 data.packing=packed
    """
    from meshwright.api import show_data
    from meshwright.config import load_run
    from meshwright.track.view import show_view

    show_view(show_data(load_run(run_file, overrides), count=count, split=split))


@main.command()
@RUN_FILE
@OVERRIDES
@click.option("--devices", type=click.IntRange(min=1), help="How many the run is to have.  [default: what is here]")
@click.option("--compile/--no-compile", "compiled", default=True, help="Compile the step, for XLA's count of memory.")
def plan(run_file: str, overrides: tuple[str, ...], devices: int | None, compiled: bool) -> None:
    """Say how a run would lie on its devices, and what memory and work it takes; nothing is allocated.

    \b
    Example:
      meshwright plan examples/stdlib.toml --devices 8 mesh.fsdp=4 mesh.tensor=2
    """
    from meshwright.api import plan
    from meshwright.config import load_run

    click.echo(plan(load_run(run_file, overrides), devices=devices, compiled=compiled))


@main.command()
@RUN_FILE
@OVERRIDES
def train(run_file: str, overrides: tuple[str, ...]) -> None:
    """Train; prepares the data if needed, and goes on where it stopped.

    Any key of the run file may be overridden after it. Ctrl-C finishes the step and saves.

    \b
    Example:
      meshwright train examples/stdlib.toml train.steps=200 optimizer.kind=lion
    """
    from meshwright.api import train
    from meshwright.config import load_run

    run = load_run(run_file, overrides)
    if run.launch.kind == "processes":
        from meshwright.launch.by_hand import place_by_hand, train_by_hand
        from meshwright.launch.processes import train_in_processes

        if place := place_by_hand(run):
            train_by_hand(place)
        sys.exit(train_in_processes(run))
    outcome = train(run)
    if outcome.stopped_by:
        sys.exit(128 + outcome.stopped_by)


@main.command("eval")
@RUN_DIR
@CHECKPOINT
def evaluate(run_dir: str, checkpoint: str) -> None:
    """Loss, perplexity and bits per byte on the validation batches.

    \b
    Example:
      meshwright eval runs/stdlib --checkpoint best
    """
    from meshwright.api import open_run

    for name, value in open_run(run_dir, checkpoint=checkpoint).evaluate().items():
        click.echo(f"{name:<18} {value if name == 'step' else format(value, '.4f')}")


@main.command()
@RUN_DIR
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="What to go on from; may be given often.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="The most tokens to add.  [default: 200, or to the length trained]"
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0: the likeliest.")
@click.option("--top-k", type=click.IntRange(0, 2**31 - 1), default=0, help="Choose among the k likeliest; 0: all.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Or among this share.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Same seed, same text.")
@CHECKPOINT
def generate(
    run_dir: str,
    prompts: tuple[str, ...],
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    checkpoint: str,
) -> None:
    """Let a trained model write.

    One prompt is written as it comes; several are worked on as one batch, then shown one after another.

    \b
    Example:
      meshwright generate runs/stdlib --prompt "def " --temperature 0.7
    """
    from meshwright.api import open_run
    from meshwright.engines.base import Sampling
    from meshwright.track.text import visible

    shown = visible if sys.stdout.isatty() else str  # a model may write what a terminal would obey
    trained = open_run(run_dir, checkpoint=checkpoint)
    if len(prompts) <= 1:
        prompt = prompts[0] if prompts else ""
        pieces = trained.stream(prompt, Sampling(temperature, top_k, top_p, seed), max_tokens=max_tokens)
        first = next(pieces, [""])  # before anything is shown, so that a mistake shows as its line alone
        click.echo(shown(prompt + first[0]), nl=False)
        for piece in pieces:
            click.echo(shown(piece[0]), nl=False)
        click.echo()
        return
    texts = trained.generate(
        list(prompts), max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        click.echo(f"--- {number} ---\n{shown(prompt + text)}")


@main.command()
@RUN_DIR
@click.argument("out", metavar="OUT")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option(
    "--shard-size",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="GB",
    help="The most gigabytes of tensors in a file.",
)
@click.option("--adapter", is_flag=True, help="Of a LoRA run: the adapters alone, for peft.  [default: merged]")
@CHECKPOINT
def export(run_dir: str, out: str, dtype: str, shard_size: float, adapter: bool, checkpoint: str) -> None:
    """Write the model as a Hugging Face checkpoint, and prove that it is the run's.

    What was written is opened again, and its logits on real tokens are compared with the run's own; with transformers
    too, where it is installed. Beyond tolerance, the folder is named OUT.failed.

    \b
    Example:
      meshwright export runs/stdlib stdlib-model --checkpoint best
    """
    from meshwright.api import open_run

    trained = open_run(run_dir, checkpoint=checkpoint)
    done = trained.export(out, dtype=dtype, shard_bytes=int(shard_size * 1e9), adapter=adapter)
    for line in done.proof:
        click.echo(line)
    click.echo(f"exported to {done.path}: {', '.join(done.files)} ({done.bytes:,} bytes)")


@main.command()
@RUN_DIR
def report(run_dir: str) -> None:
    """Write report.html: curves, samples, run file, in one file that opens from disk.

    \b
    Example:
      meshwright report runs/stdlib
    """
    from meshwright.storage.mirror import local_run
    from meshwright.track.report import write_report

    click.echo(write_report(local_run(run_dir)))


@main.command()
def doctor() -> None:
    """Say what this machine has, and what is wrong with it.

    \b
    Example:
      meshwright doctor
    """
    from meshwright.doctor import examine

    findings = examine()
    for finding in findings:
        click.echo(f"{'ok  ' if finding.good else 'FAIL'}  {finding.name:<12} {finding.text}")
    sys.exit(0 if all(finding.good for finding in findings) else 1)
