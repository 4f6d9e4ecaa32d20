"""`trireme generate`: text from a trained language model."""

import sys

import click

from app.cli.common import Invocation, verb
from app.errors import UserError


@verb("generate")
@click.argument("run", metavar="RUN")
@click.argument("text", required=False)
@click.option(
    "--max-tokens",
    type=int,
    default=200,
    show_default=True,
    metavar="N",
    help="Tokens to add at most.",
)
@click.option(
    "--temperature",
    type=float,
    default=0.8,
    show_default=True,
    metavar="T",
    help="0 takes the most probable token.",
)
@click.option("--top-k", type=int, metavar="K", help="Draw from the K most probable tokens only.")
@click.option(
    "--top-p",
    type=float,
    metavar="P",
    help="Draw from the fewest tokens that together reach P.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="The same seed gives the same text.",
)
@click.option(
    "--step",
    type=int,
    metavar="N",
    help="The checkpoint of this step. Default: the newest intact one.",
)
@click.option("--interactive", is_flag=True, help="Ask for one text after another, until Ctrl-D.")
def generate(
    cli: Invocation,
    run: str,
    text: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    step: int | None,
    interactive: bool,
) -> None:
    """Continue a text with a language model that a run has trained, or trains now.

    \b
    trireme generate runs/gpt "def main("
    trireme generate runs/gpt "import " --temperature 0.5 --top-k 40 --step 300
    trireme generate runs/llama --interactive

    Works for every language model of Trireme's own and of transformers, trained on whatever layout,
    on this machine's GPU if it has one. A model with an encoder (T5, BART) reads the given text and
    writes a text of its own.
    """
    from app.run.look import open_run

    if text is None and not interactive:
        raise UserError('no text is given: write one, such as "def main(", or --interactive')
    storage = open_run(run)
    from app.results.generate import Sampling, Writer  # imports torch

    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    cli.console.status("reading the checkpoint")
    writer = Writer(storage, step, cli.console.say)
    generator = writer.generator(seed)

    def print_continuation(prompt: str) -> str:
        pieces = []
        for piece in writer.write_on(prompt, sampling=sampling, generator=generator):
            pieces.append(piece)
            cli.console.part(piece)
        cli.console.say("")
        return "".join(pieces)

    texts = []
    if text is not None:
        cli.console.part(text)
        texts.append(text + print_continuation(text))
    while interactive:
        try:
            prompt = input("> " if sys.stdin.isatty() and not cli.as_json else "")
        except EOFError:
            break
        texts.append(prompt + print_continuation(prompt))
    cli.answer({"status": "complete", "step": writer.step, "texts": texts})
