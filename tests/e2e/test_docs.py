"""Every fenced command and Python block of the documentation is run, or carries the reason why not.

The rules a page follows:

- A fence is ``python``, ``bash`` or ``text``. Blocks of a page run in order, in one folder and one namespace
  (:func:`namespace`), with a tiny Llama where a page says ``model``, ``MODEL`` or ``smollm2``.
- ``<!-- not run: REASON -->`` on the line before a fence keeps it from running. REASON is one of :data:`REASONS`; what
  can be checked without running still is: that files and ``make`` targets exist, and that our command line takes the
  arguments.
"""

import importlib.util
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import fu_compile
from fu_compile import __main__ as cli
from fu_compile import models
from fu_compile.errors import CODES, MissingDependencyError

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REASONS = {"needs a GPU", "needs a download", "takes minutes", "sets up the machine", "runs the tests"}
LANGUAGES = {"python", "bash", "text"}

# Arguments that only make a command shorter; argparse takes the last value of a switch.
SHORTER = {
    "generate": ["--max-new-tokens", "3"],
    "bench": ["--prompt-tokens", "4", "--new-tokens", "2", "--repeat", "1"],
    "perplexity": ["--file", "text.txt", "--windows", "0", "--length", "12", "--paths", "eager"],
}


@dataclass
class Block:
    page: pathlib.Path
    line: int
    language: str
    text: str
    reason: str | None
    """Why it is not run."""

    def __str__(self):
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self):
        """Shell lines, continued lines joined, without comments and prompts."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [c for c in (shlex.split(line.removeprefix("$ "), comments=True) for line in lines) if c]


def blocks(page):
    found, before, inside = [], "", None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"^ *```(\w*)", line)
        if inside is None and fence:
            marker = re.fullmatch(r"<!-- not run: (.*) -->", before.strip())
            inside = Block(page, number, fence[1], "", marker[1] if marker else None)
        elif inside is not None and fence:
            found.append(inside)
            inside, before = None, ""
        elif inside is not None:
            inside.text += line + "\n"
        else:
            before = line
    assert inside is None, f"{page.name} ends inside a fence"
    return found


ALL = [block for page in PAGES for block in blocks(page)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A saved Llama of one layer with a tokenizer of 64 words."""
    folder = tmp_path_factory.mktemp("tiny")
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token="w1", pad_token="w0")
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, eos_token_id=None, bos_token_id=None, pad_token_id=0, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def namespace(tiny):
    """What a page may use without saying where it comes from."""
    model, tokenizer = models.load(tiny)
    return {
        "__name__": "docs", "torch": torch, "fu_compile": fu_compile, "model": model, "tokenizer": tokenizer,
        "config": model.config, "inputs": tokenizer("w3 w4 w5 w6", return_tensors="pt"), "MODEL": str(tiny),
    }  # fmt: skip


@pytest.fixture
def place(tiny, tmp_path, monkeypatch):
    """An empty folder to run in; nothing is downloaded, and what is not ours runs in eager (no C++ compiler)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FU_REST", "eager")
    monkeypatch.setattr(models, "smollm2", lambda **more: models.load(tiny, **more))
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in torch.randint(3, 64, (60,)).tolist()))
    torch._dynamo.reset()
    yield tmp_path
    torch._dynamo.reset()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_block_of_a_page_runs(page, tiny, place, capsys):
    names = namespace(tiny)
    for block in blocks(page):
        if block.reason:
            continue
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
        elif block.language == "bash":
            for command in block.commands:
                shell(command, str(tiny), str(block))


_done = set()
"""Command lines that have run: pages repeat each other."""


def shell(command, tiny, block):
    program = command[0]
    if program == "fu-compile" or command[:3] == ["python", "-m", "fu_compile"]:
        rest = [tiny if c in ("MODEL", "smollm2") else c for c in command[1 if program == "fu-compile" else 3 :]]
        rest += SHORTER.get(rest[0], [])
        meaning = repr(sorted(vars(cli.parser().parse_args(rest)).items(), key=str))
        if meaning in _done:
            return
        _done.add(meaning)
        code = cli.main(rest)
        assert code == 0 or (rest[0] == "doctor" and code == 1), f"{block}: {' '.join(command)}: {code}"
    elif program == "python":
        runpy.run_path(command[1], run_name="__main__")
    else:
        pytest.fail(f"{block}: this test cannot run {program!r}; mark the block with one of {sorted(REASONS)}")


@pytest.mark.parametrize("block", ALL, ids=str)
def test_blocks_follow_the_rules(block):
    assert block.language in LANGUAGES
    if block.language == "text":
        assert not re.search(r"^(\$ |python |pip |make |fu-compile )", block.text, re.M), "a command hides as text"
    if block.reason is None:
        return
    assert block.reason in REASONS
    if block.language == "python":
        compile(block.text, str(block), "exec")
        return
    targets = make_targets()
    for command in block.commands:
        while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
            command = command[1:]
        if command[0] == "make":
            assert {c for c in command[1:] if "=" not in c} <= targets
        elif command[:3] == ["python", "-m", "fu_compile"]:
            cli.parser().parse_args(command[3:])
        elif command[0] in ("python", "pytest") or "pytest" in command:
            files = [c for c in command[1:] if "/" in c and not c.startswith("-")]
            assert all((ROOT / f.partition("::")[0]).exists() for f in files), files


def make_targets():
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def test_what_is_not_run_is_the_small_part():
    """A marker is an exception: most blocks run, and every reason that is allowed is used by some block."""
    runnable = [block for block in ALL if block.language != "text"]
    marked = [block for block in runnable if block.reason]
    assert len(runnable) >= 25
    assert len(marked) <= len(runnable) / 2
    assert {block.reason for block in marked} == REASONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_options_links_and_pictures_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in make_targets(), target
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, link
    # Indented code would escape the rules above. (In lists four spaces continue an item.)
    assert not re.search(r"^\n {4}(python|pip|pytest|make|TORCH_LOGS|fu-compile)\b", text, re.M)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in PAGES[2:]:
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def test_troubleshooting_tells_what_to_do_for_every_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (FU-\w+-\d+) \| (.+) \|$", text, re.M))
    assert set(rows) == set(CODES)
    assert all(len(advice.split()) >= 2 or "`" in advice for advice in rows.values())


def test_the_report_page_lists_every_finding_store_and_counter():
    from fu_compile.report import COUNTERS, FORMATS, STORES

    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    for name in (*COUNTERS, *FORMATS, *STORES):
        assert f"`{name}`" in text, name


def test_the_options_page_lists_every_variable():
    from fu_compile.options import OTHER_VARIABLES

    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for name in OTHER_VARIABLES:
        assert f"| `{name}` |" in text, name


# ---- pictures --------------------------------------------------------------------------------------------------------


def screenshots():
    spec = importlib.util.spec_from_file_location("screenshots", ROOT / "docs" / "screenshots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def size_of(png):
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def test_the_pictures_are_taken_where_there_is_a_browser(tiny, place, monkeypatch):
    monkeypatch.delenv("CHROME", raising=False)
    script = screenshots()
    arguments = ["--model", str(tiny), "--layers", "1", "--out", str(place / "images")]
    if not any(shutil.which(name) for name in script.BROWSERS):  # then the call is refused before any work, by name
        with pytest.raises(MissingDependencyError, match="no browser"):
            script.main(arguments)
        assert not (place / "images").exists()
        return
    script.main(arguments)
    for name in ("report.png", "explain-8b.png"):
        width, height = size_of(place / "images" / name)
        assert (width, height > 500) == (script.WIDTH, True)
        stored = ROOT / "docs" / "images" / name
        assert size_of(stored) == (width, height)
        assert stored.stat().st_size < 300_000


def test_without_a_browser_the_script_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROME", raising=False)
    with pytest.raises(MissingDependencyError, match="chromium") as caught:
        screenshots().main(["--out", str(tmp_path / "images")])
    assert "apt-get install chromium" in caught.value.advice
    assert not (tmp_path / "images").exists()
    monkeypatch.setenv("CHROME", "/no/such/browser")
    with pytest.raises(MissingDependencyError, match="/no/such/browser"):
        screenshots().browser()


def test_a_browser_that_fails_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("CHROME", sys.executable)  # takes no picture
    (tmp_path / "page.html").write_text("<p>")
    with pytest.raises(RuntimeError, match="took no picture"):
        screenshots().photograph(tmp_path / "page.html", tmp_path / "x.png", 100)
    assert subprocess.run([sys.executable, "--version"], check=False).returncode == 0
