"""The command line: quick, readable help; errors as one line; the recipe for TorchUncertainty's command line."""

from __future__ import annotations

import argparse
import gzip
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tu_symmetry import cli

ROOT = Path(__file__).parents[2]
FIT = ROOT / "recipes" / "lightning" / "mnist_ensemble_rebasin.yaml"


def ended(words: Sequence[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What a command that exits prints, on standard output or, if it fails, on standard error."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", sys.argv)  # LightningCLI leaves its own
        cli.main(words)
    shown = capsys.readouterr()
    assert end.value.code == code
    return shown.err if code else shown.out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = ended(["--help"], capsys)
    assert all(f"  {name} " in text for name in ("table", "fit", "validate", "test", "predict"))


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help_with_its_arguments_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"usage: tu-symmetry {name}" in ended([name, "--help"], capsys)
    parser = argparse.ArgumentParser()
    cli.COMMANDS[name][1](parser)
    assert parser.description and all(action.help for action in parser._actions)


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom tu_symmetry.cli import main\n"
        "for words in (['--help'], ['table', '--help'], ['align', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'torch_uncertainty', 'matplotlib', 'sklearn'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The configuration that LightningCLI understands."""
    config = yaml.safe_load(ended([*words, "--print_config"], capsys))
    assert isinstance(config, dict)
    return config


def test_lightnings_arguments_are_lightnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several files, the later over the earlier; dotted flags over both; a callback by its bare name."""
    later = tmp_path / "later.yaml"
    later.write_text("trainer: {max_epochs: 3}\nroutine: {num_bins_calibration_error: 9}\n")
    words = ["--config", str(FIT), "--config", str(later), "--routine.num_classes", "7", "--data.root", "elsewhere"]
    config = printed(capsys, "fit", *words, "--trainer.callbacks+=ScaleCanonicalization")
    assert config["trainer"]["max_epochs"] == 3
    assert [c["class_path"].rpartition(".")[2] for c in config["trainer"]["callbacks"]] == [
        "Rebasin",
        "ScaleCanonicalization",
    ]
    assert config["routine"]["class_path"] == "torch_uncertainty.routines.ClassificationRoutine"
    routine = config["routine"]["init_args"]
    assert (routine["num_classes"], routine["num_bins_calibration_error"], routine["is_ensemble"]) == (7, 9, True)
    assert config["data"]["init_args"]["root"] == "elsewhere"
    assert config["eval_after_fit"] is True


def test_another_routine_is_named_as_lightning_names_classes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--routine=torch_uncertainty.routines.RegressionRoutine", "--routine.output_dim=1"]
    words += ["--routine.model=torch.nn.Linear", "--routine.model.in_features=3", "--routine.model.out_features=1"]
    config = printed(capsys, "fit", *words, "--data=torch_uncertainty.datamodules.MNISTDataModule")
    assert config["routine"]["class_path"] == "torch_uncertainty.routines.RegressionRoutine"
    assert config["routine"]["init_args"]["output_dim"] == 1
    assert "--routine.num_classes" in ended(["fit", "--routine.help", "ClassificationRoutine"], capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--trainer.maximal_epochs", "1"], "maximal_epochs"),
        (["--config", str(FIT), "--routine.num_clases", "7"], "num_clases"),
    ],
)
def test_mistakes_in_lightnings_arguments_end_with_its_usage(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ended(["fit", *words], capsys, code=2)
    assert message in error and "Traceback" not in error


def write_idx(path: Path, tensor: torch.Tensor) -> None:
    header = struct.pack(f">HBB{tensor.ndim}I", 0, 8, tensor.ndim, *tensor.shape)
    path.write_bytes(header + tensor.numpy().tobytes())
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.slow
def test_the_recipe_for_lightning_fits_aligns_and_tests(tmp_path: Path) -> None:
    """On random images in MNIST's format: the YAML parses, the callback aligns, the configuration is saved."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 600), ("t10k", 100)):
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        write_idx(raw / f"{split}-images-idx3-ubyte", images)
        write_idx(raw / f"{split}-labels-idx1-ubyte", (torch.arange(count) % 10).to(torch.uint8))
    words = ["fit", "--config", str(FIT), "--data.root", str(tmp_path / "data"), "--trainer.max_epochs", "1"]
    words += ["--trainer.limit_train_batches", "3", "--trainer.enable_progress_bar", "false"]
    words += ["--trainer.accelerator", "cpu", "--trainer.log_every_n_steps", "1"]
    command = [sys.executable, "-m", "tu_symmetry.cli", *words]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "mnist_ensemble_rebasin" / "version_0"
    assert "Rebasin" in (run / "config.yaml").read_text()
    names = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"rebasin/NoT", "rebasin/barrier_after", "test/cls/Acc"} <= set(names)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    options = ["--model", "torch.nn.Linear", "--init", "in_features=3", "out_features=2", "--input", "1,3"]
    command = [sys.executable, "-m", "tu_symmetry.cli", "inspect", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors and "BrokenPipe" not in errors
