"""What a newcomer meets: versions for conda and pip, a wheel with the whole package, the README."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import yaml

import nanoeuler
from nanoeuler.book import build as tool

ROOT = Path(__file__).parents[1]


def test_environment_asks_for_what_pyproject_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = (extras[name] for name in ("book", "data", "test", "gpu"))
    wanted = {*project["dependencies"]}.union(*named)
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = {item.replace("=", "==") for item in listed if isinstance(item, str)}
    conda -= {"pip", "python>=="} | {item for item in conda if item.startswith("python>")}
    by_pip = {item for entry in listed if isinstance(entry, dict) for item in entry["pip"]}
    assert "python" + project["requires-python"] in listed
    assert "-e ." in by_pip
    assert conda | by_pip - {"-e ."} == wanted


def test_a_wheel_holds_every_room_and_runs_from_an_empty_folder(tmp_path):
    source, empty, installed = (tmp_path / name for name in ("source", "empty", "installed"))
    source.mkdir(), empty.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("nanoeuler", "data"):
        rubbish = shutil.ignore_patterns("__pycache__", "fetched", "prepared", "embedded")
        shutil.copytree(ROOT / name, source / name, ignore=rubbish)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if name.startswith("nanoeuler/")}
        archive.extractall(installed)
    assert modules == set(tool.package(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "nanoeuler", "--help"], cwd=empty, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert done.returncode == 0 and "train" in done.stdout, done.stderr


def named_tuples(tree):
    """The names of a module's own named tuples."""
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)
            and "NamedTuple" in map(ast.unparse, node.bases)}  # fmt: skip


def untyped(file):
    """The public functions and methods of a module that say nothing of an argument or a result.

    But for what runs on a GPU: parts of kernels, in modules that use its instructions, may have no
    types but those of groups of arguments, named tuples, since they take registers and addresses,
    and each says in words which.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in (node for body in (tree, *classes) for node in body.body):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            silent = [a for a in named if not a.annotation and a.arg not in ("self", "cls")]
            kernel = "from nanoeuler.engines.gpu.lang.instruction import" in text
            groups = {ast.unparse(a.annotation) for a in named if a.annotation}
            part = kernel and not node.returns and groups <= named_tuples(tree)
            if (silent or not node.returns) and not part:
                yield f"{file}: {node.name}"


# Modules that have public parts of kernels.
PARTS_OF_KERNELS = (
    "gemm/epilogue", "gemm/wgmma_form", "gemm/wgmma_epilogue", "attention/wgmma_forward"
)  # fmt: skip


def test_a_package_that_says_it_is_typed_is():
    """But for commands, whose arguments the command line reads, and parts of kernels."""
    files = [file for file in tool.package(ROOT) if file.endswith(".py")]
    assert "nanoeuler/py.typed" in tool.package(ROOT)
    parts = [f"nanoeuler/engines/gpu/{name}.py" for name in PARTS_OF_KERNELS]
    assert {*parts} <= {*files}
    typed = [file for file in files if not file.startswith(("nanoeuler/cli/", *parts))]
    silent = {line for file in typed for line in untyped(file)}
    assert not silent


def row_of(chapter, owners):
    """The line of the README's table for a chapter: its title, and the modules that it exports."""
    title = re.search(r"^# (\w+)\. (.+)$", chapter.read_text(encoding="utf-8"), re.M)
    name = chapter.relative_to(ROOT).as_posix()
    files = [file for file, owner in owners.items() if owner == name and file.endswith(".py")]
    modules = [file[len("nanoeuler/") : -len(".py")].replace("/", ".") for file in files]
    listed = " ".join(f"`{module}`" for module in modules if "__" not in module)
    return f"| [{title[1]} {title[2]}]({name[:-3]}.ipynb) | {listed} |"


def test_the_readme_lists_the_chapters_and_what_each_exports():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("\n")
    table = [line for line in lines if line.startswith("| [")]
    owners = {file: owner for file, (owner, _) in tool.package(ROOT).items()}
    expected = [row_of(chapter, owners) for chapter in tool.chapters(ROOT)]
    assert table == expected, "the table should be\n" + "\n".join(expected)


def test_the_readmes_names_exist():
    """Files that it links to, and what `import nanoeuler as ne` is said to have."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
    names = set(re.findall(r"\bne\.(\w+)", text))
    assert names and [name for name in names if not hasattr(nanoeuler, name)] == []
