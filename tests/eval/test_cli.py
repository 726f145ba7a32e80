"""The command line: one screen of commands, and a line for a fault, before heavy imports."""

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
import contextlib, io, json, shlex, sys
from eval.cli import main
found, heavy = {}, json.loads(sys.argv[2])
for command in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            status = main(shlex.split(command))
        except SystemExit as ended:
            status = ended.code
    if isinstance(status, str):  # the process would print it and exit with 1
        said.write(status)
        status = 1
    imported = [name for name in heavy if name in sys.modules]
    found[command] = [status or 0, said.getvalue(), imported]
print(json.dumps(found))
"""
# {command: part of its output}
SHOWN = {
    "--help": "usage: lazyllm-bench COMMAND",
    "run --help": "\nmax_new_tokens=null",
    "methods": "    draft=null keep=0.3 lookahead=8 chunk=32 pool=13 sound=false",
    "run --version": "lazyllm-bench ",
    "run --list": "model=  llama2, ",
    "fetch --help": "Download what runs need",
    "run --cfg job warmup=1": "max_new_tokens: null",
}
# {command: part of its error}
REFUSED = {
    "rnu": "did you mean run?",
    "fetch --cfg job": "--cfg: expected KEY=VALUE",
    "check static_pruning layer=5 keep=0.5": "method 'static_pruning': static pruning prunes",
    "check lazy schedule": "schedule: expected KEY=VALUE",
    # keys and choices that are unknown, with the nearest known one
    "run -m modl=tiny,llama2": "modl: no such setting: did you mean model?",
    "run timing.warmup=0": "timing.warmup: no such setting: did you mean warmup?",
    "run ++limits=1": "limits=1: no such setting: the nearest names are limit, ",
    "run ~limt": "Could not delete from config. 'limt' does not exist",
    "run sdpa_backend=flash": "no such setting: did you mean model.sdpa_backend?",
    "run --limit 4": "--limit: expected KEY=VALUE",
    "run limit": "limit: expected KEY=VALUE, such as limit=3",
    "run model=lama2": "model=lama2: the nearest names are llama2, llama2-base, ",
    "run model.name=org/x": "model.name=org/x: give model=org/x, which may be a preset, a folder",
    "run model=[tiny,llama2]": "expected one model; -m model=tiny,llama2 takes several",
    "run method=nosuch": "method=nosuch: the nearest names are ",
    "run method=mine.py": "method=mine.py: no such file",
    "run method=lazy,asl": "Ambiguous value for argument 'method=lazy,asl'",
    "run method=[lazy,fastkv]": "expected one method; arms=[lazy,fastkv] takes several",
    "run method=null": "method=null: Config group override must be a string or a list",
    "run method.keep=0.5": "method.keep: no such setting: method=NAME chooses a method",
    "run method=lazy method.schedul=3": "did you mean method.schedule? method=NAME chooses",
    "run method=lazy +method.kep=0.5": "method 'lazy' has no setting 'kep'; it has schedule",
    "run experiment=nosuch": "experiment=nosuch: the nearest names are demo, ",
    "run dataset=/no/such": "dataset=/no/such: expected a YAML file that describes",
    "run dataset=MADE/rows/trec.jsonl": "rows/trec.jsonl: expected a YAML file that",
    "run dataset=[lookup,shotz]": "dataset=shotz: the nearest names are shots, ",
    "run tracker=wnadb": "tracker=wnadb: expected one of wandb, none",
    "tune targetspeedup=2": "targetspeedup: no such setting: did you mean target_speedup?",
    # values
    "run warmup=many": "warmup=many: expected a whole number",
    "run limit=0": "limit=0: expected 1 or more, or null",
    "run seed=-1": "seed=-1: expected 0 or more",
    "run seed=9223372036854775808": "seed=9223372036854775808: expected less than 922337",
    "run threads=999999999": "threads=999999999: expected at most 1024, or null",
    "run out=": "out=: expected a text that is not empty, or null",
    "run subset=some": "subset=some: expected first or random or by_length or mini",
    "run label='${draft}'": "label: Interpolation key 'draft' not found",
    "run out=http://[::1]/x": "out=http://[::1]/x: mismatched input '[' expecting <EOF> (",
    "run model.dtype=int8": "model.dtype=int8: expected auto or float32 or ",
    "run model.paper=llama3": "model.paper=llama3: expected llama2 or xgen, or null",
    "run model.today=now": "model.today=now: expected a date, YYYY-MM-DD",
    "run 'model.system=Be brief'": "is for the tokenizer's chat template: give model.chat",
    "run model.attn_implementation=eager model.sdpa_backend=math": "math chooses among the",
    "run needle.lengths=300": "needle.lengths=300: expected a list",
    "run random.length=[0]": "random.length.0=0: expected 1 or more",
    "run random.length=[9,9]": "random.length=[9, 9]: expected a list of different numbers",
    "run tracker.mode=online": "tracker.mode=online: expected tracker=wandb with it",
    "run baseline=false fidelity=answer": "fidelity=answer: expected baseline=true with it",
    # arms and their speed
    "run arms={a:lazy}": 'error: arms={"a": "lazy"}: expected a list',
    "run arms=[]": "arms=[]: expected at least one value",
    "run arms=[lazy,fastkv,lazy]": "arms: two are named 'lazy': give one of them another label",
    "run 'arms=[{schedule: paper}]'": "arms.0.name=null: expected a value",
    "run 'arms=[{name: lazy, label: baseline}]'": "'baseline' names the standard model, which base",
    "run 'arms=[{name: lazy, seeds: 5}]'": "seeds=5: method lazy has no seed: leave seeds out",
    "run 'arms=[{name: random_drop, seeds: 0}]'": "arms.0.seeds=0: expected 1 or more",
    "run 'arms=[{name: random_drop, keep: []}]'": "random_drop: keep=[]: give at least one value",
    "run method=random_drop method.seeds=0": "method.seeds=0: expected 1 or more",
    "run method=random_drop method.keep=fast": (
        "method 'random_drop': keep='fast': give a number in (0, 1]"
    ),
    "run method=lazy method.schedule={2:1.5}": "keep ratio after layer 2 lies in (0, 1], got 1.5",
    "run method=lazy method.schedule={9:0.5}": "lazy: the schedule prunes after layer 9, but the",
    """run method=lazy 'method.schedule={"2":0.5}'""": "do not quote the keys of a mapping)",
    "run experiment=field speedup=0.5": "speedup=0.5: expected a speedup of 1 or more",
    "run method=asl speedup=3x": "speedup=3x: no arm takes it (asl): leave it out",
    "run 'arms=[{name: random_drop, keep: 0.5}]' speedup=3x": "no arm takes it (random_drop)",
    "run 'arms=[{name: baseline, speedup: 3x}]'": "baseline: speedup=3x cannot be solved for",
    "run 'arms=[{name: asl, speedup: 3x}]'": "prompt: leave it out, and give keep and retain",
    "run 'arms=[{name: uniprefill, speedup: 2x}]'": "on the prompt: leave it out, and give p",
    "run 'arms=[{name: random_drop, speedup: 3x, keep: 0.5}]'": "gives keep: leave out keep=0.5",
    "run 'arms=[{name: fastkv, speedup: table1}]'": "fastkv: Table 1 has no speedup of fastkv",
    "run method=claa arms=[lazy,fastkv]": "already: give arms=[lazy,fastkv,claa]",
    "plan -m experiment=demo method=lazy,asl": "already: leave it out, or give arms=[lazy]",
    "run experiment=demo arms.0.sped=3x": "arms.0.sped: no such setting: +arms.0.sped=... adds",
    "run experiment=demo arms.9.speedup=3x": "arms.9.speedup=3x: list index out of range",
    "run experiment=demo 'arms.0={name: claa}'": "a mapping would be merged into what the arm has",
    # data, files, models and folders
    "run dataset=[qasper,lookup]": "datasets of several suites (longbench, embedded) share no",
    "run model=llama2 dataset=trec subset=random": "subset=random: expected limit=50 or so with it",
    "run dataset=qasper_e data.dir=MADE/rows subset=mini": "or by_length, as longbench_e has no",
    "run dataset=hops random.seed=9": "random.seed=9: expected dataset=random with it: hops",
    "run dataset=hops data.length=2048": "data.length=2048: expected dataset=ruler, or other rows",
    "run dataset=[vt,cwe] data.dir=MADE": "vt: its file is not in MADE/4096",
    "run dataset=example data.dir=MADE": "data.dir=MADE: expected no such key, as the description",
    "run dataset=needle needle.haystack=nowhere": "haystack=nowhere: expected a text file or",
    "run data.dir=nowhere": "data.dir=nowhere: expected an existing folder",
    "run data.dir=MADE/rows": "data.dir=MADE/rows: expected dataset=NAME with it, as embedded has",
    "run dataset=trec data.dir=MADE/rows": "rows/trec.jsonl:10: not valid JSON in UTF-8",
    "run dataset=trec data.dir=MADE/no_config": "config/dataset2prompt.json is missing",
    "run out=MADE/file/run": "MADE/file/run: cannot be written (MADE/file)",
    "run model=./nowhere": "'./nowhere' is not a model: there is no such folder",
    "run model=MADE/checkpoint": "MADE/checkpoint holds neither tokenizer.json nor tokenizer.model",
    "run model.tokenizer=/nowhere dataset=lookup": "/nowhere: no such file or folder",
    "run dataset=random \"model='layers=2,width=7'\" model.load_format=dummy": "heads of an even",
    "run dataset=random \"model='layers=2,width=64'\"": "have random weights only",
    "run model=llama2 dataset=lookup": "meta-llama/Llama-2-7b-chat-hf: it is not in the hub",
    "run model=llama2 model.load_format=dummy dataset=lookup": "so the tokenizer must be",
    "fetch model=llama2 dataset=lookup": ". Fetch it where the hub answers, without HF_HUB_OFFLINE",
    "run method=specprefill method.draft=./nowhere": "specprefill: draft=./nowhere: './nowhere' is",
    "run dataset=lookup 'arms=[{name: prompt_compression, scorer: org/gpt}]'": (
        "prompt_compression: scorer=org/gpt: it is not in the hub's cache; give a folder"
    ),
    # sweeps
    "run hydra.launcher.n_jobs=2": "hydra.launcher.n_jobs=2 configures the jobs of a sweep: give",
    # the search
    "tune": "target_speedup=null: expected a number",
    "tune target_speedup=1": "target_speedup=1: expected more than 1",
    "tune target_speedup=2 method=baseline": "arms=baseline: expected method=lazy",
    "tune target_speedup=2 method=lazy method.schedule={2:0.3}": "leave it out, as the search",
    "tune target_speedup=2 speedup=2x": "leave it out, as target_speedup is what is reached",
    "tune target_speedup=2 baseline=false": "baseline=false: expected true",
    "tune target_speedup=2 dataset=trec data.dir=MADE/rows": "rows/trec.jsonl:10: not valid",
}
# Refused with heavy modules, before a model loads
LATE = {
    "run tracker=wandb tracker.mode=online": "tracker.mode=online: expected a key (wandb login",
    "wandb-report MADE/runs --publish": "--publish needs --entity NAME",
    "wandb-report MADE/runs --publish --entity me": "--publish needs a key",
    "wandb-report nosuch --out x.json": "no such folder",
    "wandb-report MADE/runs": "give --out FILE for the specification, or --publish",
    "paper MADE --examples 0": "--examples=0: expected 1 or more",
    "paper nosuch": "no such folder",
    "status nosuch": "no such folder",
    "status MADE": "no run in or below",
    "run dataset=needle needle.lengths=[99999]": "99999 tokens of prompt and answer exceed",
    "run model.chat=auto": "the tokenizer has no chat template: give model.chat=none",
    "run model.max_prompt_tokens=99999": "the model has 4096 positions: give fewer",
    "run model.device=cuda out=MADE/run": "sees none: give device=cpu (in a run model.device=cpu)",
    "run model.device=warp dataset=lookup": "device 'warp'",
    "run dataset=hotpotqa": "data.dir=FOLDER",
    "run 'arms=[lazy,{name: lazy, label: b, prune_generated: false}]'": (
        "arms: b has the settings of lazy: change one, or leave it out"
    ),
    "plan dataset=lookup model.device=cuda": "or plan for another machine: --gpu b200, ",
    "plan dataset=lookup method=static_pruning method.layer=99": "static_pruning: static pruning",
    "plan dataset=lookup method=fastkv speedup=2x": (
        "fastkv cannot reach an ideal TTFT speedup of 2 on 8 layers: give a lower one"
    ),
    "plan model=llama2 dataset=lookup": "lazyllm-bench fetch",
    "tune target_speedup=40 dataset=lookup limit=2": "expected less, as the default's layers",
    "tune target_speedup=2 dataset=lookup limit=1": "limit=1: expected two rows or more",
}
COMMANDS = SHOWN | REFUSED | LATE


def made(folder: Path) -> Path:
    """Run folders, rows and a checkpoint that cannot be used."""
    files = {
        "file": "",
        "rows/trec.jsonl": "{\n" * 12,
        "rows/config/dataset2prompt.json": json.dumps({"trec": "{context}{input}"}),
        "rows/config/dataset2maxlen.json": json.dumps({"trec": 8}),
        "no_config/trec.jsonl": "{}",
        "checkpoint/config.json": (ROOT / "lazyllm/models/tiny/config.json").read_text(),
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
    commands = [command.replace("MADE", str(folder)) for command in COMMANDS]
    caches = {"HF_HUB_CACHE": str(folder / "hub"), "LAZYLLM_BENCH_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PLAY, json.dumps(commands), json.dumps(HEAVY)],
        cwd=folder / "empty",
        env=os.environ | caches | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list((folder / "empty").glob("*/*")) == []  # no run's folder, and no file of a sweep
    return json.loads(done.stdout.replace(str(folder), "MADE"))


@pytest.mark.parametrize("command", COMMANDS)
def test_command_refuses_in_one_line_before_anything_heavy_is_imported(answers, command) -> None:
    status, said, heavy = answers[command]
    text = COMMANDS[command]
    assert status == (0 if command in SHOWN else 2)
    assert not status or "error: " in said
    assert text in (said.splitlines()[-1] if command in LATE else said)
    assert re.search("loading tiny|Loading weights", said) is None
    if command not in LATE:
        assert heavy == []
        # ten bad rows have a line each
        assert not status or "rows/trec" in text or len(said.splitlines()) == 1


def test_help_is_one_screen_with_a_line_for_each_command(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    for command, (module, _) in cli.COMMANDS.items():
        assert sum(line.split()[:1] == [command] for line in lines) == 1
        assert find_spec(module) is not None


def test_run_without_its_packages_is_refused_with_the_remedy() -> None:
    command = [sys.executable, "-S", ROOT / "run.py"]
    done = subprocess.run(command, capture_output=True, text=True, env={})
    assert done.returncode == 2
    remedy = r"error: .* lacks the packages .* make setup .* source \.venv/bin/activate .*\n"
    assert re.fullmatch(remedy, done.stderr)


def test_closed_pipe_is_no_error() -> None:
    """`lazyllm-bench status | head -1`: the reader ends before the command writes."""
    usage = "cli.usage = lambda: time.sleep(1) or 'x' * 100_000"
    code = f"import time; from eval import cli; {usage}; cli.main(['--help'])"
    command = f"'{sys.executable}' -c \"{code}\" | true"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True)
    assert done.stderr == b""


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    command = f"'{sys.executable}' -m eval.cli --help {closed}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_terminal_without_the_sign_shows_another() -> None:
    (run,) = (ROOT / "results" / "smollm2" / "records").glob("*-needle")
    command = [sys.executable, "-m", "eval.cli", "results", str(run)]
    plain = os.environ | {"PYTHONIOENCODING": "ascii"}
    process = subprocess.run(command, capture_output=True, env=plain, check=True)
    assert b"?" in process.stdout  # for ±
    assert b"Error" not in process.stderr


def test_first_example_waits_for_no_import_that_only_tables_and_trackers_need() -> None:
    code = "import sys, eval.run.loop; print(*sorted(set(sys.argv[1:]) & sys.modules.keys()))"
    command = [sys.executable, "-c", code, *HEAVY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch", "transformers"]
