"""List names that let a pickle run code, access files or use the network. A file that uses one of them is refuted.

The list only affects how severely a name is reported: a name on neither this list nor the allow-list is recorded as a
doubt.
"""

from __future__ import annotations

import _compat_pickle

from gpuwarden.checkpoints.pickles.nodes import Global

# The list includes every name in these modules and their submodules.
_WHOLE = """
IPython _aix_support _ctypes _osx_support _pickle _posixsubprocess _pyrepl aiohttp antigravity asyncio atexit bdb
cProfile cffi code codeop commands compileall ctypes dill distutils doctest ensurepip fileinput ftplib gc idlelib
imaplib imp importlib jax.experimental lib2to3 linecache logging.config marshal multiprocessing nntplib nt
numpy.f2py numpy.testing os pdb pickle pip pkgutil popen2 poplib posix profile pty py_compile pydoc requests
rlcompleter runpy setuptools shutil signal site smtplib socket socketserver ssl subprocess sys telnetlib timeit
tkinter torch._dynamo torch._inductor torch.hub torch.utils.benchmark torch.utils.bottleneck
torch.utils.collect_env torch.utils.cpp_extension trace turtle urllib urllib2 venv webbrowser xmlrpc zipimport
"""
_MODULES = frozenset(_WHOLE.split())
_NAMES = {
    "_io": "FileIO open open_code",
    "_thread": "start_new start_new_thread start_joinable_thread",
    "bz2": "BZ2File open",
    "builtins": "__import__ apply breakpoint compile delattr eval exec execfile exit file getattr globals help input"
    " locals open quit raw_input reload setattr vars",
    "cloudpickle.cloudpickle": "_builtin_type _function_setstate _make_cell _make_empty_cell _make_function subimport"
    " _make_skel_func _fill_function _rehydrate_skeleton_class _dynamic_class_tree_reduce loads load",
    "cloudpickle": "load loads",
    "codecs": "open EncodedFile",
    "functools": "reduce",
    "gzip": "GzipFile open",
    "io": "FileIO open open_code OpenWrapper",
    "joblib": "load dump",
    "joblib.numpy_pickle": "load dump",
    "logging": "FileHandler",
    "lzma": "LZMAFile open",
    "numpy": "DataSource fromfile fromregex genfromtxt load loadtxt memmap save savetxt",
    "operator": "attrgetter call methodcaller",
    "_operator": "attrgetter call methodcaller",
    "pandas": "eval read_pickle",
    "platform": "_syscmd_file _syscmd_ver popen",
    "sqlite3": "connect",
    "tarfile": "TarFile open",
    "tempfile": "NamedTemporaryFile mkdtemp mkstemp mktemp",
    "threading": "Thread Timer",
    "torch": "load save",
    "torch.fx.experimental.symbolic_shapes": "ShapeEnv.evaluate_guards_expression",
    "torch.jit": "load",
    "torch.jit.unsupported_tensor_ops": "execWrapper",
    "torch.serialization": "_legacy_load _load load save",
    "torch.utils._config_module": "ConfigModule.load_config",
    "torch.utils.data.datapipes.utils.decoder": "basichandlers",
    "types": "CodeType FunctionType LambdaType MethodType",
    "uuid": "_get_command_stdout _popen getnode",
    "weakref": "finalize",
    "zipfile": "ZipFile",
}
_LISTED = frozenset((module, name) for module, names in _NAMES.items() for name in names.split())
# Attributes that lead from any object to the interpreter's internals.
_SPECIAL = """
__builtins__ __call__ __class__ __closure__ __code__ __dict__ __getattribute__ __globals__ __import__ __loader__
__mro__ __reduce__ __reduce_ex__ __self__ __setattr__ __setstate__ __spec__ __subclasses__ f_builtins f_globals
gi_frame tb_frame
"""
_INSIDE = frozenset(_SPECIAL.split())
# Modules that many other modules import. An attribute with one of these names may be the module itself.
_IMPORTED = "builtins ctypes importlib marshal nt os pickle posix pty runpy shutil socket subprocess sys"
_REACHED = frozenset(_IMPORTED.split())
# Harmless names in the modules above, such as records and loggers.
_HARMLESS = frozenset(
    {("torch._dynamo.decorators", "_DimRange")}
    | {("os", "stat_result"), ("os", "terminal_size"), ("sys", "float_info"), ("sys", "version_info")}
    | {("logging", n) for n in ("Logger", "getLogger")}
)


def runs_code(name: Global) -> bool:
    """Return true if a name is known to run code. A name from Python 2 is also checked under its current name."""
    key = (name.module, name.name)
    today = _compat_pickle.NAME_MAPPING.get(key) or (
        _compat_pickle.IMPORT_MAPPING.get(name.module, name.module),
        name.name,
    )
    return _runs(*key) or _runs(*today)


def _runs(module: str, name: str) -> bool:
    if (module, name) in _HARMLESS:
        return False
    path, own = module.split("."), name.split(".")
    if (module, name) in _LISTED or _INSIDE.intersection(own) or own[0] in _REACHED:
        return True
    whole = [*path, *own]
    if any(".".join(whole[: i + 1]) in _MODULES for i in range(len(whole))):
        return True
    # Unpickling resolves a dotted name through attributes, for example `module.os.system` or `Class.eval`.
    return any(_runs(".".join(own[:i]), ".".join(own[i:])) for i in range(1, len(own))) or any(
        ("builtins", part) in _LISTED for part in own[1:]
    )
