"""Calls FFI handlers from Python as XLA would, without XLA or a GPU.

A handler is a C function that takes an XLA_FFI_CallFrame (xla/ffi/api/c_api.h, API 0.1). This
module builds that struct with ctypes and implements the few functions of XLA's API that the
handlers use. Buffers are addresses that are never dereferenced, since no kernel runs.
"""

import ctypes as C
from dataclasses import dataclass, field

INITIALIZE, EXECUTE = 2, 3  # XLA_FFI_ExecutionStage
DTYPES = {
    "bool": 1,
    "int32": 4,
    "int64": 5,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 16,
}
DTYPES |= {"int8": 2, "int16": 3, "uint32": 8, "complex64": 15, "float8_e4m3fn": 20}
CODES = {3: "InvalidArgument", 12: "Unimplemented", 13: "Internal"}
P, I64, SIZE = C.c_void_p, C.c_int64, C.c_size_t


def struct(name, *fields):
    return type(name, (C.Structure,), {"_fields_": list(fields)})


def sized(name, *fields):
    """A struct that begins with its size and a list of extensions, as most of the API's do."""
    return struct(name, ("struct_size", SIZE), ("extension_start", P), *fields)


Buffer = sized("Buffer", ("dtype", C.c_int), ("data", P), ("rank", I64), ("dims", P))
Operands = sized("Operands", ("size", I64), ("types", P), ("items", P))
Attributes = sized("Attributes", ("size", I64), ("types", P), ("names", P), ("items", P))
ByteSpan = struct("ByteSpan", ("text", C.c_char_p), ("size", SIZE))
Scalar = struct("Scalar", ("dtype", C.c_int), ("value", P))
Version = sized("Version", ("major", C.c_int), ("minor", C.c_int))
ErrorCreate = sized("ErrorCreate", ("message", C.c_char_p), ("code", C.c_int))
StreamGet = sized("StreamGet", ("ctx", P), ("stream", P))
Callback = C.CFUNCTYPE(P, P)
API = [
    "Error_Create",
    "Error_GetMessage",
    "Error_Destroy",
    "Handler_Register",
    "Stream_Get",
    "TypeId_Register",
    "ExecutionContext_Get",
    "State_Set",
    "State_Get",
    "DeviceMemory_Allocate",
    "DeviceMemory_Free",
    "ThreadPool_Schedule",
    "ThreadPool_NumThreads",
    "Future_Create",
    "Future_SetAvailable",
    "Future_SetError",
    "RunId_Get",
    "DeviceOrdinal_Get",
]
Api = sized("Api", ("version", Version), ("internal", P), *((name, Callback) for name in API))
CallFrame = sized(
    "CallFrame",
    ("api", P),
    ("ctx", P),
    ("stage", C.c_int),
    ("args", Operands),
    ("rets", Operands),
    ("attrs", Attributes),
    ("future", P),
)
Metadata = struct(
    "Metadata", ("struct_size", SIZE), ("version", Version), ("traits", C.c_uint32), ("state", I64)
)
MetadataExtension = struct(
    "MetadataExtension", ("struct_size", SIZE), ("type", C.c_int), ("next", P), ("metadata", P)
)


@dataclass(frozen=True)
class Array:
    """An operand or result, as XLA describes it."""

    dtype: str
    shape: tuple[int, ...]
    address: int = 0


@dataclass
class Failure:
    code: str
    message: str


@dataclass
class Xla:
    """XLA's side of a call: a stream, and the errors that handlers created."""

    stream: int = 0xABC0
    errors: dict[int, Failure] = field(default_factory=dict)

    def __post_init__(self):
        self._next = 1
        self._callbacks = {
            "Error_Create": Callback(self._create),
            "Stream_Get": Callback(self._stream),
        }
        self._api = Api(struct_size=C.sizeof(Api), version=Version(C.sizeof(Version), None, 0, 1))
        for name, callback in self._callbacks.items():
            setattr(self._api, name, callback)

    def _create(self, args):
        args = ErrorCreate.from_address(args)
        key, self._next = self._next, self._next + 1
        self.errors[key] = Failure(CODES.get(args.code, str(args.code)), args.message.decode())
        return key

    def _stream(self, args):
        StreamGet.from_address(args).stream = self.stream
        return

    def call(self, capsule, stage, operands, results, attributes):
        """Runs a handler. Returns None, or the Failure that the handler returned."""
        keep = []

        def buffers(arrays):
            structs = []
            for a in arrays:
                dims = (I64 * max(1, len(a.shape)))(*a.shape)
                buffer = Buffer(C.sizeof(Buffer), None, DTYPES[a.dtype], a.address, len(a.shape))
                buffer.dims = C.addressof(dims)
                keep.append(dims)
                structs.append(buffer)
            return pointers(structs, Operands, [1] * len(structs))

        def pointers(items, kind, codes, **more):
            types = (C.c_int * max(1, len(items)))(*codes)
            addresses = (P * max(1, len(items)))(*map(C.addressof, items))
            keep.extend((items, types, addresses))
            return kind(
                struct_size=C.sizeof(kind),
                size=len(items),
                types=C.addressof(types),
                items=C.addressof(addresses),
                **more,
            )

        names, scalars = [], []
        for name, (dtype, value) in sorted(attributes.items()):
            names.append(ByteSpan(name.encode(), len(name)))
            if dtype == "string":
                scalars.append(ByteSpan(value.encode(), len(value.encode())))
                continue
            cell = {"float32": C.c_float, "int32": C.c_int32, "int64": I64}[dtype](value)
            keep.append(cell)
            scalars.append(Scalar(DTYPES[dtype], C.addressof(cell)))
        codes = [4 if isinstance(x, ByteSpan) else 3 for x in scalars]  # XLA_FFI_AttrType
        name_list = (P * max(1, len(names)))(*map(C.addressof, names))
        frame = CallFrame(
            # Without `future`, which API 0.1 does not declare.
            struct_size=CallFrame.attrs.offset + C.sizeof(Attributes),
            api=C.addressof(self._api),
            stage=stage,
            args=buffers(operands),
            rets=buffers(results),
            attrs=pointers(scalars, Attributes, codes, names=C.addressof(name_list)),
        )
        error = handler(capsule)(C.addressof(frame))
        return self.errors.pop(error) if error else None

    def metadata(self, capsule):
        """(API version, traits), which XLA queries when a handler is registered."""
        found = Metadata(struct_size=C.sizeof(Metadata))
        extension = MetadataExtension(C.sizeof(MetadataExtension), 1, None, C.addressof(found))
        frame = CallFrame(
            struct_size=CallFrame.attrs.offset + C.sizeof(Attributes),
            extension_start=C.addressof(extension),
            api=C.addressof(self._api),
        )
        assert not handler(capsule)(C.addressof(frame))
        return (found.version.major, found.version.minor), found.traits


def handler(capsule):
    get = C.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = P, [C.py_object, C.c_char_p]
    return Callback(get(capsule, None))
