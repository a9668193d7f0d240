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


def test_is_called_at_once_for_a_module_that_is_there(library):
    importlib.import_module(f"{library}.waited_for")
    called = []
    after_import(f"{library}.waited_for", lambda: called.append(1))
    assert called == [1]


def test_leaves_the_module_as_its_own_loader_makes_it(library):
    import inspect

    after_import(f"{library}.waited_for", lambda: None)
    looked_for = importlib.util.find_spec(f"{library}.waited_for")
    assert looked_for.loader.get_source(looked_for.name).startswith('"""Words."""')
    module = importlib.import_module(f"{library}.waited_for")
    assert inspect.getsource(module).startswith('"""Words."""')
    assert type(module.__loader__) is type(importlib.import_module(library).__loader__)
    assert module.__spec__.loader is module.__loader__


def test_who_only_looks_for_the_module_does_not_end_the_waiting(library):
    called = []
    after_import(f"{library}.waited_for", lambda: called.append(1))
    assert importlib.util.find_spec(f"{library}.waited_for") is not None
    assert not called
    importlib.import_module(f"{library}.waited_for")
    assert called == [1]


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
