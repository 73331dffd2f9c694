"""environment.yml (conda) and pyproject.toml must ask for the same versions."""

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_environment_asks_for_what_pyproject_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["book"], *extras["data"], *extras["test"]}
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = {item.replace("=", "==") for item in listed if isinstance(item, str)}
    conda -= {"pip", "python>=="} | {item for item in conda if item.startswith("python>")}
    by_pip = {item for entry in listed if isinstance(entry, dict) for item in entry["pip"]}
    assert "python" + project["requires-python"] in listed
    assert "-e ." in by_pip
    assert conda | by_pip - {"-e ."} == wanted
