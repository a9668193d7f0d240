"""A function that waits for another library's module, and does not load it."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from ropecli.on_import import after_import


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package with the modules `waited_for` and `broken`, none of them loaded."""
    package = tmp_path / "waiting_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "waited_for.py").write_text('"""Words."""\nNUMBER = 7\n')
    (package / "broken.py").write_text("raise ImportError('of its own')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield "waiting_package"
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("waiting_package")]:
        del sys.modules[name]


def test_waits_until_the_module_is_there(library):
    called = []
    after_import(f"{library}.waited_for", lambda: called.append(sys.modules[f"{library}.waited_for"].NUMBER))
    importlib.import_module(library)
    assert not called
    assert f"{library}.waited_for" not in sys.modules
    module = importlib.import_module(f"{library}.waited_for")
    assert called == [7]
    importlib.reload(module)
    assert called == [7]


def test_a_module_that_fails_fails_as_without(library):
    called = []
    after_import(f"{library}.broken", lambda: called.append(1))
    with pytest.raises(ImportError, match="of its own"):
        importlib.import_module(f"{library}.broken")
    after_import(f"{library}.missing", lambda: called.append(1))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{library}.missing")
    assert not called


def test_importing_ropecli_makes_its_attention_known():
    """Without loading the model libraries for it. tests/checkpoint/test_carrier.py imports it after transformers."""
    code = (
        "import ropecli, transformers, sys\n"
        "loaded = 'transformers.modeling_utils' in sys.modules\n"
        "from transformers import AttentionInterface, AttentionMaskInterface\n"
        "known = [interface._global_mapping for interface in (AttentionInterface, AttentionMaskInterface)]\n"
        "print(loaded, *('ropecli:rerope' in one for one in known))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
