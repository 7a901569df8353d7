"""Define the names that a pickle may use: values, functions with arguments of known types, and plain-object classes.

Any other name is reported as a doubt. Full names are compared, and no list contains a dotted name, which protocol 4
would resolve through attributes. A function that calls or imports its arguments is allowed only with arguments that
can't be called or imported.
"""

from __future__ import annotations

import _compat_pickle
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import AbstractSet, Any, Callable, Dict, FrozenSet, Tuple  # noqa: UP035  (aliases are evaluated, on Python 3.8 too)

from gpuwarden.checkpoints.pickles.nodes import Call, Global

Key = Tuple[str, str]  # noqa: UP006
Check = Callable[[Tuple[Any, ...]], bool]  # noqa: UP006
_Names = Dict[str, FrozenSet[str]]  # noqa: UP006

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "ComplexDoubleStorage": "C128",
    "UntypedStorage": "U8", "QInt8Storage": "I8", "QUInt8Storage": "U8", "QInt32Storage": "I32",
    "QUInt4x2Storage": "U8", "QUInt2x4Storage": "U8",
}  # fmt: skip
TORCH_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "complex128": "C128",
    "complex32": "C32", "bits8": "U8", "bits16": "U16",
    # One byte contains several elements, so these tensors are read as bytes.
    "float4_e2m1fn_x2": "U8", "bits1x8": "U8", "bits2x4": "U8", "bits4x2": "U8",
}  # fmt: skip
REBUILD = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7, "_rebuild_qtensor": 6}
WRAP = frozenset({"_rebuild_parameter", "_rebuild_parameter_with_state"})
_OTHER = (
    "_rebuild_sparse_tensor", "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor",
    "_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_wrapper_subclass",
)  # fmt: skip
_REBUILT = frozenset({*REBUILD, *WRAP, *_OTHER})
_TENSORS = frozenset({("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")})

# Types and constants that may be arguments of the calls below, and are never called themselves.
_VALUES: _Names = {
    "torch": frozenset(
        {
            *STORAGES,
            *TORCH_DTYPES,
            "Tensor",
            "strided",
            "per_tensor_affine",
            "per_channel_affine",
            "per_channel_affine_float_qparams",
        }
    ),
    "torch.cuda": frozenset(STORAGES),
    "torch.storage": frozenset({"TypedStorage", "UntypedStorage", "_TypedStorage", "_UntypedStorage"}),
    "torch.nn.parameter": frozenset({"Parameter", "Buffer"}),
    "numpy": frozenset({"ndarray"}),
    "builtins": frozenset({"object"}),
}


@lru_cache(maxsize=4096)
def canonical(name: Global) -> Key:
    """Return the current module and name. Protocol 2 uses Python 2's names, and numpy has renamed some modules."""
    key = _compat_pickle.NAME_MAPPING.get((name.module, name.name))
    module, own = key or (_compat_pickle.IMPORT_MAPPING.get(name.module, name.module), name.name)
    return re.sub(r"^numpy\._core\b", "numpy.core", re.sub(r"^pathlib\._local$", "pathlib", module)), own


# ------------------------------------------------------------------------------------------------------- arguments


def _scalar(value: Any) -> bool:
    """Accept a string, bytes, a number or None. Protocol 2 stores bytes as a call that encodes a string."""
    if isinstance(value, Call) and isinstance(value.func, Global):
        return canonical(value.func) in {("_codecs", "encode"), ("builtins", "bytes")}
    return isinstance(value, (str, bytes, int, float, bool, type(None)))


def _is_one_of(value: Any, names: AbstractSet[Key]) -> bool:
    return isinstance(value, Global) and canonical(value) in names


def _scalars(args: tuple[Any, ...]) -> bool:
    return all(map(_scalar, args))


def _numbers(args: tuple[Any, ...]) -> bool:
    return all(isinstance(a, (int, float, type(None))) for a in args)


def _texts(args: tuple[Any, ...]) -> bool:
    return all(type(a) is str for a in args)


def _nothing(args: tuple[Any, ...]) -> bool:
    return not args


def _bytes(args: tuple[Any, ...]) -> bool:
    """Accept the content of a bytes object, but not its length, which could be enormous."""
    return _scalars(args) and not any(isinstance(a, (int, float)) for a in args)


def _ratio(args: tuple[Any, ...]) -> bool:
    """Accept two integers or a string. An exponent in the string is rejected, because the number could be enormous."""
    if len(args) == 1:
        return type(args[0]) is str and re.fullmatch(r"-?[0-9]{1,1000}(/[0-9]{1,1000})?", args[0]) is not None
    return len(args) == 2 and all(type(a) is int for a in args)


def _literal(args: tuple[Any, ...]) -> bool:
    """Accept no argument, or one list, tuple or dict. Any other object could be infinite or run code."""
    return not args or (len(args) == 1 and type(args[0]) in (list, tuple, dict))


def _moment(args: tuple[Any, ...]) -> bool:
    """Accept numbers, bytes, and objects from the datetime module, such as a time zone."""
    funcs = [a.func if isinstance(a, Call) else None for a in args if not _scalar(a)]
    return all(isinstance(f, Global) and f.module == "datetime" for f in funcs)


def _rebuilt(args: tuple[Any, ...]) -> bool:
    """Accept storages, numbers, tensors, and allowed names such as a tensor type or a dtype."""
    return all(not isinstance(a, Global) or allows(a) for a in args)


def _from_type(args: tuple[Any, ...]) -> bool:
    """Accept a tensor-rebuilding function with its arguments, if calling it with them is allowed."""
    if len(args) != 4 or not isinstance(args[0], Global) or not isinstance(args[1], Global):
        return False
    func, kind, inner = canonical(args[0]), canonical(args[1]), args[2]
    fits = func[0] == "torch._utils" and func[1] in _REBUILT and kind in _TENSORS and isinstance(inner, tuple)
    return fits and CALLS[func](inner) and attributes(args[3])


def _numpy_dtype(args: tuple[Any, ...]) -> bool:
    """Accept a letter and a size, as numpy writes a dtype. numpy evaluates other strings as expressions."""
    code = args[0] if args else None
    return type(code) is str and re.fullmatch(r"[A-Za-z?][0-9]{0,9}", code) is not None and _scalars(args)


def _made_dtype(value: Any) -> bool:
    return isinstance(value, Call) and is_dtype(value)


def is_dtype(value: Call) -> bool:
    """Return true if the call creates a numpy dtype."""
    if not isinstance(value.func, Global):
        return False
    module, name = canonical(value.func)
    return (module, name) == ("numpy", "dtype") or (module == "numpy.dtypes" and name in _NUMPY_DTYPES)


def attributes(state: Any) -> bool:
    """Return true for an attribute dict. Special names are rejected, because the next opcode could call them."""
    if isinstance(state, tuple) and len(state) == 2 and state[1] is None:
        state = state[0]
    return state is None or (isinstance(state, dict) and all(type(k) is str and not k.startswith("__") for k in state))


# ----------------------------------------------------------------------------------------------------------- calls

_NUMPY_DTYPES = frozenset(
    f"{n}DType"
    for n in ("Bool", "Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Int64", "UInt64", "Long", "ULong",
              "LongLong", "ULongLong", "Float16", "Float32", "Float64", "LongDouble", "Complex64", "Complex128",
              "CLongDouble", "Bytes", "Str", "Void", "DateTime64", "TimeDelta64", "Object")
)  # fmt: skip
# The only types that a defaultdict may call for a missing key.
_FACTORIES = frozenset(
    {("collections", "OrderedDict"), *(("builtins", n) for n in ("list", "dict", "set", "int", "float", "str"))}
)
# The functions that torch's safe loader allows by default, and the functions that random number states need.
_TORCH_CALLS: Dict[Key, Check] = {  # noqa: UP006
    ("collections", "OrderedDict"): _literal,
    ("collections", "Counter"): _literal,
    ("collections", "defaultdict"): lambda args: (
        len(args) < 2 and all(a is None or _is_one_of(a, _FACTORIES) for a in args)
    ),
    ("builtins", "set"): _literal,
    ("builtins", "complex"): _numbers,
    ("builtins", "bytearray"): _bytes,
    # Only Latin-1 is allowed, because looking up another encoding imports a module.
    ("_codecs", "encode"): lambda args: len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"),
    ("torch", "Size"): _literal,
    ("torch", "device"): _scalars,
    ("torch.serialization", "_get_layout"): _texts,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    **{("torch._utils", n): _rebuilt for n in _REBUILT},
    ("torch._utils", "_rebuild_parameter_with_state"): lambda args: _rebuilt(args) and all(map(attributes, args[3:4])),
    ("numpy", "dtype"): _numpy_dtype,
    # Only `ndarray` itself is allowed, not a subclass.
    ("numpy.core.multiarray", "_reconstruct"): lambda args: (
        len(args) == 3 and _is_one_of(args[0], {("numpy", "ndarray")})
    ),
    # The arguments are a dtype and bytes.
    ("numpy.core.multiarray", "scalar"): lambda args: (
        len(args) <= 2 and all(map(_made_dtype, args[:1])) and _scalars(args[1:])
    ),
    # The arguments are bytes, a dtype, a shape and an order.
    ("numpy.core.numeric", "_frombuffer"): lambda args: (
        all(map(_made_dtype, args[1:2])) and all(_scalar(a) or type(a) is tuple or i == 1 for i, a in enumerate(args))
    ),
    **{("numpy.dtypes", n): _nothing for n in _NUMPY_DTYPES},
}
# Standard library functions that torch's safe loader does not accept.
_PYTHON_CALLS: Dict[Key, Check] = {  # noqa: UP006
    **{("builtins", n): _literal for n in ("dict", "list", "tuple", "frozenset")},
    **{("builtins", n): _numbers for n in ("slice", "range")},
    **{("builtins", n): _scalars for n in ("int", "float", "str", "bool")},
    ("builtins", "bytes"): _bytes,
    ("collections", "deque"): lambda args: len(args) <= 2 and _literal(args[:1]) and _numbers(args[1:]),
    **{("pathlib", n): _texts for n in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")},
    **{("datetime", n): _moment for n in ("datetime", "date", "time", "timedelta", "timezone")},
    ("decimal", "Decimal"): _texts,
    ("fractions", "Fraction"): _ratio,
    ("types", "SimpleNamespace"): _nothing,
    ("uuid", "SafeUUID"): _scalars,
}
CALLS: Dict[Key, Check] = {**_TORCH_CALLS, **_PYTHON_CALLS}  # noqa: UP006
_GETATTR = ("builtins", "getattr")
_TABLES = frozenset({("collections", n) for n in ("OrderedDict", "Counter", "defaultdict")} | {("builtins", "dict")})
_SEQUENCES = frozenset({("builtins", "list"), ("builtins", "set"), ("collections", "deque")})


@dataclass(frozen=True)
class Names:
    """The names that one kind of file may use.

    Instances of `records` are created by `__new__` without arguments and then get attributes. `enums` are called with
    one plain value. Instances of `tuples` have a tuple as their state. `values` are never called.
    """

    records: re.Pattern[str]
    enums: frozenset[Key] = frozenset()
    tuples: frozenset[Key] = frozenset()
    values: frozenset[Key] = frozenset()

    def allows(self, name: Global) -> bool:
        """Return true if a name is on one of the lists."""
        return allows(name) or self.beyond_torch(name) or (bool(self.enums) and canonical(name) == _GETATTR)

    def beyond_torch(self, name: Global) -> bool:
        """Return true if a name is on the lists, but torch's safe loader rejects it."""
        key = canonical(name)
        return key in _PYTHON_CALLS or key in self.enums or key in self.values or self.record(name)

    def record(self, name: Global) -> bool:
        """Return true for a class whose instances are created without running its code and then get attributes."""
        return "." not in name.name and self.records.fullmatch(":".join(canonical(name))) is not None

    def call(self, made: Call) -> str:
        """Return the reason why a call may be unsafe; "" if it is harmless or its name is reported elsewhere."""
        func, args = made.func, made.args
        if not isinstance(func, Global):
            return "calls a value that is not an imported name"
        if not self.allows(func):
            return ""
        key = canonical(func)
        if isinstance(args, tuple) and self._fits(key, func, args, made.new):
            return ""
        return f"calls {func} in a way that is not known to be harmless"

    def _fits(self, key: Key, func: Global, args: tuple[Any, ...], new: bool) -> bool:
        if key in CALLS:
            function = key[0] == "_codecs" or key[0].startswith(("torch", "numpy"))
            return not (new and function) and CALLS[key](args)
        if self.record(func):
            return new and not args
        if key == ("copyreg", "_reconstructor"):
            # Protocols 0 and 1 create objects with this function, without running `__init__`.
            plain = len(args) == 3 and _is_one_of(args[1], {("builtins", "object")}) and args[2] is None
            return plain and isinstance(args[0], Global) and self.record(args[0])
        if key == _GETATTR:  # Python 3.11.0 uses getattr for enum members.
            is_enum = len(args) == 2 and _is_one_of(args[0], self.enums)
            return is_enum and type(args[1]) is str and re.fullmatch("[A-Z][A-Z0-9_]*", args[1]) is not None
        return key in self.enums and len(args) == 1 and _scalar(args[0])

    def state(self, target: Any, state: Any) -> str:
        """Return the reason why setting a state may be unsafe; "" if it is safe or its class is reported elsewhere."""
        func = target.func if isinstance(target, Call) else None
        if isinstance(target, dict):
            return "" if attributes(state) else "sets special attributes of a dict"
        if not isinstance(func, Global) or not self.allows(func):
            return ""
        key = canonical(func)
        if key in self.tuples or key == ("numpy.core.multiarray", "_reconstruct") or is_dtype(target):
            fits = isinstance(state, tuple)
        else:
            settable = self.record(func) or key in {("types", "SimpleNamespace"), ("copyreg", "_reconstructor")}
            fits = settable and attributes(state)
        return "" if fits else f"changes an object of {func} in a way that is not known to be harmless"

    def filled(self, target: Call, *, sequence: bool) -> str:
        """Return the reason why adding elements may run code, such as an overridden `append`; "" if this is safe."""
        func = target.func
        if not isinstance(func, Global) or not self.allows(func):
            return ""
        fits = canonical(func) in (_SEQUENCES if sequence else _TABLES)
        return "" if fits else f"adds elements to an object of {func}"


def known(name: Global) -> bool:
    """Return true if torch's safe loader accepts this name."""
    return canonical(name) in _TORCH_CALLS or name.name in _VALUES.get(canonical(name)[0], ())


@lru_cache(maxsize=4096)
def allows(name: Global) -> bool:
    """Return true if every kind of file may use a name."""
    return known(name) or canonical(name) in _PYTHON_CALLS or canonical(name) == ("copyreg", "_reconstructor")


# --------------------------------------------------------------------------------------------- names by kind of file

_SIMPLE = (
    r"argparse:Namespace",
    r"uuid:UUID",
    r"torch\.utils\.data\.dataset:TensorDataset",
)
_TRAINER = (
    r"transformers\.training_args:TrainingArguments",
    r"transformers\.training_args_seq2seq:Seq2SeqTrainingArguments",
    r"transformers\.trainer_pt_utils:AcceleratorConfig",
    r"transformers\.utils\.quantization_config:[A-Z][A-Za-z0-9]{0,30}Config",
    r"trl\.(trainer|experimental\.[a-z0-9_]+)\.[a-z0-9_]+_config:[A-Z][A-Za-z0-9]{0,60}Config",
    r"accelerate\.state:(PartialState|AcceleratorState|GradientState)",
    r"accelerate\.utils\.dataclasses:[A-Z][A-Za-z0-9]{0,60}(Plugin|Kwargs|Config)",
    r"accelerate\.parallelism_config:ParallelismConfig",
    r"deepspeed\.runtime\.fp16\.loss_scaler:(LossScaler|DynamicLossScaler)",
    r"deepspeed\.utils\.tensor_fragment:fragment_address",
)
_ENUMS = {
    "accelerate.utils.dataclasses": "DistributedType DynamoBackend RNGType SageMakerDistributedType LoggerType",
    "transformers.trainer_utils": (
        "HubStrategy IntervalStrategy SaveStrategy SchedulerType EvaluationStrategy FSDPOption"
    ),
    "transformers.training_args": "OptimizerNames ParallelMode",
    "transformers.debug_utils": "DebugOption",
    "transformers.utils.quantization_config": "QuantizationMethod AWQLinearVersion AwqFormat AwqBackend",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum",
    "torch.distributed.fsdp.api": "BackwardPrefetch ShardingStrategy StateDictType",
}
_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_DCP_METADATA = (
    re.escape(_METADATA) + r":(Tensor|Bytes|Chunk)StorageMetadata",
    re.escape(_METADATA) + r":(Metadata|MetadataIndex|StorageMeta|TensorProperties)",
    re.escape(_SHARDED) + r":TensorProperties",
    r"torch\.distributed\.checkpoint\.filesystem:(_StorageInfo|_StoragePrefix)",
)
_LAYOUTS = frozenset({(_METADATA, "_MEM_FORMAT_ENCODING"), (_SHARDED, "MEM_FORMAT_ENCODING")})
_PROPERTIES = frozenset({(_METADATA, "TensorProperties"), (_SHARDED, "TensorProperties")})

PLAIN = Names(re.compile("|".join(_SIMPLE)))
"""The names that any file may use."""

TRAINING = Names(
    re.compile("|".join((*_SIMPLE, *_TRAINER))),
    frozenset((module, name) for module, names in _ENUMS.items() for name in names.split()),
    values=frozenset({("torch.distributed", "ProcessGroup"), ("torch._C", "device")}),
)
"""The names that a file with a training library's settings may use."""

DCP_METADATA = Names(re.compile("|".join((*_SIMPLE, *_DCP_METADATA))), _LAYOUTS, _PROPERTIES)
"""The names that torch.distributed.checkpoint's `.metadata` may use."""

_HOLD_SETTINGS = ("training_args.bin", "_model_states.pt", "_optim_states.pt")


def of_file(name: str) -> Names:
    """Return the names that the pickle in a file may use, given the file's name."""
    return TRAINING if name.endswith(_HOLD_SETTINGS) else PLAIN
