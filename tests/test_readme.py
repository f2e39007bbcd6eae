"""Every code block of README.md runs, or is checked as far as it can be without another machine.

The words after a block's three backticks say what happens to it:

``python``           a program of its own, run in a subprocess and an empty folder, with ZKV_BROKER
                     naming a fresh cluster on this machine (two servers) and RANK=0, WORLD_SIZE=1
``python continue``  the previous python block goes on: both are run as one program, once
``python no-run``    compiled only (it needs a GPU, say, or another machine)
``bash``             each command is looked up, not started: the program must exist, and every
                     ``--flag`` after `zkv`, `scripts/...` or `./scripts/...` must be in its --help
``bash no-run``      checked for syntax only
``toml``, ``json``   parsed
``text``             shown to the reader only; so is ``console`` (a recorded session)

Any other block, one without a word included, fails: nothing goes unchecked by mistake.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import answer_of

pytestmark = pytest.mark.source

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FENCE = re.compile(r"^(?P<indent> {0,3})(?P<ticks>`{3,}|~{3,})(?P<word>[^`]*)$")
SHOWN_ONLY = {"text", "console"}
SHELL_WORDS = {"cd", "export", "source", "set", "wait"}
PROGRAM_TIMEOUT_S = 50


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: the words after its fence, its text, and the line it begins on."""

    words: tuple[str, ...]
    text: str
    line: int


def blocks_of(markdown: str) -> list[Block]:
    """The fenced code blocks of a Markdown text, in order."""
    blocks: list[Block] = []
    fence: re.Match[str] | None = None
    began = 0
    held: list[str] = []
    for number, line in enumerate(markdown.splitlines(), start=1):
        match = FENCE.match(line)
        if fence is None:
            if match is not None:
                fence, began, held = match, number, []
        elif (
            match is not None
            and not match["word"].strip()
            and match["ticks"].startswith(fence["ticks"])
        ):
            blocks.append(Block(tuple(fence["word"].split()), "\n".join(held) + "\n", began))
            fence = None
        else:
            held.append(line.removeprefix(fence["indent"]))
    if fence is not None:
        raise ValueError(f"the block that begins in line {began} never ends")
    return blocks


def programs_of(blocks: list[Block]) -> list[Block]:
    """The python blocks to run, each with the blocks that continue it."""
    programs: list[Block] = []
    for block in blocks:
        if block.words == ("python",):
            programs.append(block)
        elif block.words == ("python", "continue"):
            if not programs:
                raise ValueError(f"line {block.line}: there is no python block to continue")
            first = programs.pop()
            programs.append(Block(first.words, first.text + block.text, first.line))
    return programs


def commands_of(script: str) -> Iterator[list[str]]:
    """The simple commands of a shell text: comments, assignments and operators taken away."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set("&|;"):
                while command and re.fullmatch(r"[A-Za-z_]\w*=.*", command[0]):
                    command.pop(0)
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def help_of(command: list[str]) -> str:
    """What `command --help` prints; a failure of it is the test's failure."""
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    text = answer_of([*command, "--help"], ROOT, environment, PROGRAM_TIMEOUT_S)
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def check_flags(command: list[str], arguments: list[str], text: str) -> None:
    """Every flag that the README gives must be one that the program's own help names."""
    for argument in arguments:
        if argument == "--":
            return
        if argument.startswith("--"):
            flag = argument.split("=")[0]
            known = re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)
            assert known, f"{shlex.join(command)} knows no {flag}"


def check_command(command: list[str]) -> None:
    """Asserts that a command of the README can be typed as it stands."""
    program, arguments = command[0].removeprefix("./"), command[1:]
    if program == "zkv":
        # The command of this interpreter's environment, whatever PATH holds.
        base = [sys.executable, "-c", "from zkv_cli.main import app; app()"]
        depth = 2 if arguments[:1] == ["plan"] else 1
        names = arguments[:depth] if arguments and not arguments[0].startswith("-") else []
        # A program's own arguments follow its file's name: `zkv run -n 3 train.py --rate 1`.
        own = next((i for i, word in enumerate(arguments) if word.endswith(".py")), None)
        check_flags(["zkv", *names], arguments[:own], help_of([*base, *names]))
    elif program.startswith("scripts/"):
        path = ROOT / program
        assert os.access(path, os.X_OK), f"{program} is not there or not executable"
        text = help_of([str(path)])
        if program != "scripts/test":  # its arguments are pytest's
            check_flags([program], arguments, text)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        for named in re.findall(r"(?:zkv|\.)\[([^\]]+)\]", " ".join(arguments)):
            for extra in named.split(","):
                assert extra.strip() in extras["optional-dependencies"], f"no extra {extra}"
    else:
        known = program in SHELL_WORDS or shutil.which(program) or (ROOT / program).is_file()
        assert known, f"{program} is no program, file or shell word"


def readme_blocks() -> list[Block]:
    return blocks_of(README.read_text("utf-8")) if README.exists() else []


def by_line(blocks: list[Block]) -> list[object]:
    if not README.exists():
        skip = pytest.mark.skip(reason="README.md is not written yet")
        return [pytest.param(None, marks=skip, id="README.md")]
    return [pytest.param(block, id=f"line-{block.line}") for block in blocks]


def run_program(text: str, folder: Path, environment: dict[str, str]) -> None:
    """Runs a python program of the README; what it printed is in the failure."""
    file = folder / "readme_block.py"
    file.write_text(text, "utf-8")
    answer_of([sys.executable, str(file)], folder, environment, PROGRAM_TIMEOUT_S)


@pytest.fixture
def cluster_environment() -> Iterator[dict[str, str]]:
    """The environment of a worker beside a fresh cluster of two servers."""
    import zkv

    with zkv.local(servers=2) as cluster:
        address = cluster if isinstance(cluster, str) else cluster.address
        yield os.environ | {"ZKV_BROKER": address, "RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.cluster
@pytest.mark.parametrize("block", by_line(programs_of(readme_blocks())))
def test_a_python_block_runs(block, tmp_path, cluster_environment):
    run_program(block.text, tmp_path, cluster_environment)


@pytest.mark.parametrize("block", by_line(readme_blocks()))
def test_a_block_is_what_it_says(block):
    match block.words:
        case ("python", *rest) if rest in ([], ["continue"], ["no-run"]):
            ast.parse(block.text)
        case ("bash", *rest) if rest in ([], ["no-run"]):
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        case ("toml",):
            tomllib.loads(block.text)
        case ("json",):
            json.loads(block.text)
        case (word,) if word in SHOWN_ONLY:
            assert block.text.strip()
        case _:
            pytest.fail(
                f"README.md:{block.line}: no rule for a block of {block.words or 'no word'}"
            )


@pytest.mark.parametrize(
    "block", by_line([block for block in readme_blocks() if block.words == ("bash",)])
)
def test_the_commands_of_a_bash_block_can_be_typed(block):
    for command in commands_of(block.text):
        check_command(command)


def test_blocks_are_found_with_their_words_and_lines():
    text = "a\n```python\nx = 1\n```\n\n```python continue\ny = x\n```\n~~~bash\n```\n~~~\n"
    blocks = blocks_of(text)
    assert [(block.words, block.line) for block in blocks] == [
        (("python",), 2),
        (("python", "continue"), 6),
        (("bash",), 9),
    ]
    assert programs_of(blocks) == [Block(("python",), "x = 1\ny = x\n", 2)]
    assert blocks[2].text == "```\n"


def test_an_open_block_and_a_continuation_of_nothing_are_named():
    with pytest.raises(ValueError, match="line 2 never ends"):
        blocks_of("a\n```python\nx = 1\n")
    with pytest.raises(ValueError, match="line 1: there is no python block"):
        programs_of(blocks_of("```python continue\nx\n```\n"))


def test_commands_lose_comments_assignments_and_operators():
    script = "# join\nZKV_A=1 zkv up --servers 2 \\\n  --policy 'ssp:3' && cd x; ls | wc &\n"
    assert list(commands_of(script)) == [
        ["zkv", "up", "--servers", "2", "--policy", "ssp:3"],
        ["cd", "x"],
        ["ls"],
        ["wc"],
    ]


def test_a_command_that_cannot_be_typed_is_named():
    check_command(["scripts/check", "--fix"])
    with pytest.raises(AssertionError, match="scripts/check knows no --faster"):
        check_command(["scripts/check", "--faster"])
    with pytest.raises(AssertionError, match="scripts/absent is not there"):
        check_command(["./scripts/absent"])
    with pytest.raises(AssertionError, match="no extra nonsense"):
        check_command(["pip", "install", "zkv[demo,nonsense]"])
    with pytest.raises(AssertionError, match="no-such-program is no program"):
        check_command(["no-such-program"])


def test_a_failing_program_shows_what_it_printed(tmp_path):
    run_program("print('fine')\n", tmp_path, dict(os.environ))
    with pytest.raises(AssertionError, match="the guilty key"):
        run_program("raise SystemExit('the guilty key')\n", tmp_path, dict(os.environ))
