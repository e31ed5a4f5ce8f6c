"""The rooms of the design: no part imports what it may not. The contracts stand in pyproject.toml."""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]


def test_no_room_imports_what_it_may_not():
    done = subprocess.run(LINT, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert " kept, 0 broken" in done.stdout


def test_a_forbidden_import_is_caught(tmp_path):
    """The linter sees an import inside a function, and one that goes round through another module."""
    package = tmp_path / "meshwright"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text("def read():\n    from meshwright import helper\n")
    (package / "helper.py").write_text("import jax\n")
    (tmp_path / ".importlinter").write_text(
        textwrap.dedent(
            """
            [importlinter]
            root_package = meshwright
            include_external_packages = true
            [importlinter:contract:a]
            name = no framework
            type = forbidden
            source_modules = meshwright.config
            forbidden_modules = jax
            """
        )
    )
    done = subprocess.run(LINT, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": "."})
    assert done.returncode == 1
    assert "meshwright.config -> meshwright.helper" in done.stdout
