"""The command line: one screen of commands, one line per user error, and no heavy import before arguments are valid."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from eval import cli
from tests.conftest import ROOT

HEAVY = ["torch", "transformers", "pandas", "matplotlib", "wandb", "datasets"]
PLAY = """
import contextlib, io, json, sys
from eval.cli import main
found, heavy = {}, json.loads(sys.argv[2])
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = ended.code
    if isinstance(status, str):  # the process would print it and exit with 1
        said.write(status)
        status = 1
    found[" ".join(arguments)] = [status or 0, said.getvalue(), [name for name in heavy if name in sys.modules]]
print(json.dumps(found))
"""
# {command: part of its output}
SHOWN = {
    "--help": "usage: lazyllm-bench COMMAND",
    "run --help": "\nmax_new_tokens=null",
    "methods": "    draft=null keep=0.3 lookahead=8 chunk=32 pool=13 sound=false",
    "run --version": "lazyllm-bench ",
    "run --list": "model=  custom, ",
    "fetch --help": "Download what runs need",
    "run --cfg job warmup=1": "max_new_tokens: null",
}
# {command: part of its error}
REFUSED = {
    "run -m modl=tiny,llama2": "error: Could not override 'modl'",
    "run modl=tiny": "error: Could not override 'modl': Key 'modl' not in 'RunConfig' (did you mean model?",
    "run model=lama2": "error: model=lama2: the nearest names are llama2, llama2-base, ",
    "run method=nosuch": "error: method=nosuch: the nearest names are ",
    "run method=lazy,asl": "error: Ambiguous value for argument 'method=lazy,asl'",
    "run method=specprefill method.draft=./nowhere": "error: './nowhere' is not a model: no such folder",
    "paper runs --within 200": "--within=200.0: expected 0 or more, and less than 100",
    "plan -m experiment=demo method=lazy,asl": "'+compare.lazy_2={name: lazy}' adds an arm",
    "run method.schedule={2:1.5}": "error: method 'lazy': the keep ratio after layer 2 lies in (0, 1], got 1.5",
    "run method.schedule={2:half}": "error: method 'lazy': the keep ratio after layer 2 is a number in (0, 1]",
    'run method.schedule={"2":0.5}': "a mapping's key none)",
    "run dataset=/no/such": "error: dataset=/no/such: the nearest names are ",
    "run dataset=nosuch": "error: dataset=nosuch: the nearest names are ",
    "run dataset=[vt,cwe] data.dir=MADE": "error: vt: its file is not in MADE/4096",
    "run dataset=example data.dir=MADE": "error: data.dir=MADE: expected no such key, as the description of example",
    "run dataset=needle needle.haystack=nowhere": "error: needle.haystack=nowhere: expected a text file or a folder",
    "run out=http://[::1]:9/v1": "a value with special signs takes quotes, for the shell too",
    "run data.dir=nowhere": "error: data.dir=nowhere: expected an existing folder",
    "fetch --cfg job": "error: --cfg: expected KEY=VALUE",
    "run model=custom model.name=./nowhere": "error: './nowhere' is not a model: no such folder",
    "run model.tokenizer=/nowhere dataset=lookup": "error: /nowhere: no such file or folder",
    "run threads=999999999": "error: threads=999999999: expected at most 1024",
    "run model=custom": "error: model.name has no default: give it on the command line, model.name=FOLDER_OR_HUB_ID",
    "check static_pruning layer=5 keep=0.5": "error: method 'static_pruning': static pruning prunes after layer 5",
    "check lazy schedule": "error: schedule: expected KEY=VALUE",
    "rnu": "did you mean run?",
    "run dataset=random model=custom model.load_format=dummy model.name='layers=2,width=7'": (
        "error: shape layers=2,width=7: expected heads of an even width"
    ),
    "run dataset=random model=custom model.name='layers=2,width=64'": (
        "error: layers=2,width=64: sizes have random weights only: give load_format=dummy"
    ),
    "run dataset=random random.length=[0]": "error: random.length=[0]: expected a list of different numbers from 1 on",
    "run dataset=random random.repeats=0": "error: random.repeats=0: expected 1 or more",
    "tune target=2": "error: Could not override 'target': Key 'target' not in 'TuneConfig'",
    "tune target_speedup=2 method=baseline": "error: method.name=baseline: expected method=lazy",
    "tune": "error: target_speedup=None: expected more than 1",
    "tune target_speedup=2 method.schedule={2:0.3}": "error: method.schedule={2: 0.3}: expected no such key",
    "tune target_speedup=2 trials=0": "error: trials=0: expected 1 or more",
    "tune target_speedup=2 baseline=false": "error: baseline=False: expected true",
    "tune target_speedup=2 experiment=demo": "error: compare=",
    "tune target_speedup=2 dataset=trec data.dir=MADE/rows": "rows/trec.jsonl:10: not valid JSON in UTF-8",
    # what the model's files, the machine and the run's folder rule out
    "run method.schedule={9:0.5}": "error: method: the schedule prunes after layer 9, but the model has only 8",
    "run method.schedule=tuned/tiny-4.2x model=llama2-base model.load_format=dummy model.tokenizer=. dataset=lookup": (
        "error: tuned/tiny-4.2x is for a model of 8 layers, but this one has 32"
    ),
    "run model=llama2 dataset=lookup": "error: meta-llama/Llama-2-7b-chat-hf: it is not in the hub's cache",
    "run model=llama2 model.load_format=dummy dataset=lookup": "error: random weights (model.load_format=dummy)",
    "fetch model=llama2 dataset=lookup": ". Fetch it where the hub answers, without HF_HUB_OFFLINE",
    "run dataset=lookup method=selective_context": "error: method.scorer=openai-community/gpt2: it is not in the hub",
    "run dataset=lookup compare=[lazy,selective_context]": "error: compare.selective_context.scorer=openai-community/",
    # one that asks the network
    "run tracker=none tracker.mode=online": "tracker.mode=online: expected tracker=wandb with it",
    "run model=tiny dataset=qasper_e data.dir=MADE/rows subset=mini": (
        "subset=mini: expected first or random or by_length, as longbench_e has no such rows"
    ),
    "run method=null": "error: method=null: Config group override must be a string or a list",
    "run dataset=trec data.dir=MADE/rows": "rows/trec.jsonl:10: not valid JSON in UTF-8",
    "run dataset=trec data.dir=MADE/no_config": "error: data.dir=MADE/no_config: config/dataset2prompt.json is",
    "run out=MADE/file/run": "error: MADE/file/run: cannot be written (MADE/file)",
    "run data.dir=MADE/rows": "error: data.dir=MADE/rows: expected dataset=NAME with it, as embedded has",
}
# Refused with heavy modules, before a model loads
LATE = {
    "run tracker=wandb tracker.mode=online": "tracker.mode=online: expected a key (wandb login",
    "wandb-report MADE/runs --publish": "--publish needs --entity NAME",
    "wandb-report MADE/runs --publish --entity me": "--publish needs a key",
    "wandb-report nosuch --out x.json": "no such folder",
    "wandb-report MADE/runs": "give --out FILE for the specification, or --publish",
    "paper MADE --examples 0": "error: --examples=0: expected 1 or more",
    "paper nosuch": "no such folder",
    "status nosuch": "no such folder",
    "status MADE": "no run in or below",
    "run dataset=needle needle.lengths=[99999]": "99999 tokens of prompt and answer exceed the model's 4096",
    "run model.chat=auto": "model.chat=auto: the tokenizer has no chat template: give model.chat=none",
    "plan dataset=lookup model.device=cuda": "or plan for another machine: --gpu b200, ",
    "plan dataset=lookup method=static_pruning method.layer=99 method.keep=0.3": "only 8 layers",
    "plan dataset=lookup method=fastkv method.keep=2x": "give another",
    "plan model=llama2 dataset=lookup": "lazyllm-bench fetch",
    "run dataset=hotpotqa": "data.dir=FOLDER",
    "run model.device=cuda out=MADE/run": "sees none: give device=cpu (in a run model.device=cpu)",
    "tune target_speedup=40 dataset=lookup limit=2": "expected less, as the default's layers cannot reach it",
    "tune target_speedup=2 dataset=lookup limit=1": "error: limit=1: expected two rows or more",
    "tune target_speedup=2 model.device=cuda": "sees none: give device=cpu (in a run model.device=cpu)",
    "run model.dtype=int8 dataset=lookup": "dtype 'int8'",
    "run model.device=warp dataset=lookup": "device 'warp'",
    "run model.max_prompt_tokens=99999": "error: model.max_prompt_tokens=99999: the model has 4096 positions: give",
}
COMMANDS = SHOWN | REFUSED | LATE


def made(folder: Path) -> Path:
    """Run folders and rows that cannot be used."""
    files = {
        "file": "",
        "rows/trec.jsonl": "{\n" * 12,
        "rows/config/dataset2prompt.json": json.dumps({"trec": "{context}{input}"}),
        "rows/config/dataset2maxlen.json": json.dumps({"trec": 8}),
        "no_config/trec.jsonl": "{}",
    }
    (folder / "empty").mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """{command: [exit code, output, heavy modules imported so far]}, all from one process."""
    folder = made(tmp_path_factory.mktemp("made"))
    commands = json.dumps([command.replace("MADE", str(folder)).split() for command in COMMANDS])
    done = subprocess.run(
        [sys.executable, "-c", PLAY, commands, json.dumps(HEAVY)],
        cwd=folder / "empty",
        env=os.environ
        | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "hub"), "LAZYLLM_BENCH_CACHE": str(folder / "cache")}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list((folder / "empty").glob("*/*")) == []  # no run's folder is made, and no file of a sweep
    return json.loads(done.stdout.replace(str(folder), "MADE"))


@pytest.mark.parametrize("command", COMMANDS)
def test_command_refuses_in_one_line_before_anything_heavy_is_imported(answers, command: str) -> None:
    status, said, heavy = answers[command]
    text = COMMANDS[command]
    assert status == (0 if command in SHOWN else 2)
    assert text in (said.splitlines()[-1] if command in LATE else said)
    assert re.search("loading tiny|Loading weights", said) is None
    if command not in LATE:
        assert heavy == []
        assert not status or "rows/trec" in text or len(said.splitlines()) == 1  # ten bad rows, a line each


def test_help_is_one_screen_with_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    for command, (module, _) in cli.COMMANDS.items():
        assert sum(line.split()[:1] == [command] for line in lines) == 1
        assert find_spec(module) is not None


def test_run_without_its_packages_is_refused_with_the_remedy() -> None:
    done = subprocess.run([sys.executable, "-S", ROOT / "run.py"], capture_output=True, text=True, env={})
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: .* has none of the packages .* make setup .* source \.venv/bin/activate .*\n", done.stderr
    )


def test_closed_pipe_is_no_error() -> None:
    """`lazyllm-bench status | head -1`: the reader ends before the command writes."""
    code = "import time; from eval import cli; cli.usage = lambda: time.sleep(1) or 'x' * 100_000; cli.main(['--help'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait()


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    command = f"'{sys.executable}' -m eval.cli --help {closed}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_terminal_without_the_sign_shows_another() -> None:
    (run,) = (ROOT / "results" / "smollm2" / "records").glob("*-revival-*")
    command = [sys.executable, "-m", "eval.cli", "results", str(run)]
    shown = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=True)
    assert b"?" in shown.stdout  # for ±
    assert b"Error" not in shown.stderr


def test_first_example_waits_for_no_import_that_only_tables_and_trackers_need() -> None:
    code = "import sys, eval.run.loop, eval.run.answers; print(*sorted(set(sys.argv[1:]) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, *HEAVY], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch", "transformers"]
