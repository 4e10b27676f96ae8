"""What a backend's hooks and kernels promise: the part of the contract that types cannot express.

The conformance kit (`amp_core.testing`) checks it, and the documentation is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Promise(NamedTuple):
    """What callers can rely on.

    Attributes:
        gives: the return value.
        writes: the arguments that are written to; only their version counters change.
        waits: whether the host may wait for the device, and what may run on it.
        errors: the errors raised.
    """

    gives: str
    writes: str = "nothing"
    waits: str = "never"
    errors: str = "none"


PROMISES: Mapping[str, str] = MappingProxyType(
    {
        "threads": "Any thread may call at any time, also in the middle of another thread's call. The "
        "result is that of a call alone.",
        "forks": "Where a forked process can use the device of its parent, as on a CPU, hooks and kernels "
        "work there too. Threads, and the locks that they hold, do not follow a fork.",
        "state": "The state of the process is as before: that of torch (grad and inference mode, autocast "
        "and its cache, default dtype and device, current device and stream, number of threads, its "
        "backends' flags, print options, function and dispatch modes), the generators of torch, of NumPy and "
        "of Python's `random`, the warnings filters, the environment, the locale, Python's own settings "
        "(logging, collector, search path, signal handlers, standard streams, flags of `dlopen`), the CPUs "
        "that may run the thread, and how it rounds and flushes floats. "
        "Other threads see it unchanged in between, too. Nothing is printed, no warning is repeated.",
        "context": "The result depends on the arguments alone. It is the same in a region, in any grad mode, "
        "in inference mode (where new tensors are inference tensors), under any default dtype or device, and "
        "under a `TorchDispatchMode` that only looks. Numbers in the text of a reason or refusal may change "
        "from call to call.",
        "memory": "A kernel keeps neither its arguments nor its results alive after the call, and needs no "
        "more memory and no more open files with every call. The result of `prepare` may keep tensors; that "
        "of `layout` may not.",
        "identity": "A kernel reads the values of the moment. The same object, or the same address, may "
        "contain other values in the next call.",
        "arguments": "Shapes that do not match raise `ValueError` before anything is written. All "
        "that is only read stays as it is: values, version counters, `requires_grad`, and the memory around.",
        "traced tensors": "For FakeTensors the results are fake, with the shapes, dtypes and strides of real "
        "ones, and no address is read. Under `torch.func`, `cast` follows the transform; others follow it "
        "or raise.",
        "streams": "A kernel puts its work on the current stream of the device.",
        "subclasses": "A subclass of `Tensor` that only wraps another tensor has no address. What a kernel "
        "gives for it is right, by torch's operations on it.",
        "absent device": "Every hook answers where the device or its driver is missing, as on a login node.",
    }
)
"""What every hook and kernel promises."""

HOOKS: Mapping[str, Promise] = MappingProxyType(
    {
        "availability": Promise(
            "`Availability(usable, reason)` for now, not as of import",
            waits="may ask the driver; allocates nothing",
            errors="none: what is wrong is the reason",
        ),
        "default_dtype": Promise(
            "the dtype of a region that names none and is in no other region for the device, one of "
            "`supported_dtypes()`. Where torch has a setting, "
            "which users may set to any dtype, it is the setting: a region warns of one that is not "
            "supported and is disabled, as torch's"
        ),
        "supported_dtypes": Promise(
            "a tuple of floating dtypes, without float64, for the device that is present",
            waits="may ask the driver; allocates nothing",
        ),
        "dtype_reason": Promise("words: why `dtype` is not supported"),
        "autocast_refusal": Promise(
            "`None` to admit, float32 always; `Refusal(message, error)` to warn and disable, or to raise"
        ),
        "scaler_refusal": Promise(
            "`None` to admit an enabled `GradScaler`, as for a device that is there; else a `Refusal`"
        ),
        "op_policy": Promise("an `OpPolicy` for `device_type`, equal each time"),
        "recommended_recipe": Promise(
            "the `Recipe` of a region with the dtype float8_e4m3fn, equal each time"
        ),
        "kernels": Promise("a `Kernels`, the same object each time for the devices that are present"),
        "scaled_products": Promise("a `ScaledProducts`, for the devices that are present"),
    }
)

KERNELS: Mapping[str, Promise] = MappingProxyType(
    {
        "layout": Promise("what `prepare` wants to know of such tensors, without a reference to them"),
        "prepare": Promise(
            "the tensors, all and in order, in a form that the others take faster as `tensors` or `grads`"
        ),
        "cast": Promise(
            "new tensors with the strides of `torch.empty_like`, or `out`, which may be `tensors`; rounded "
            "to nearest even: one right answer, bit for bit",
            writes="`out`, if given",
            errors="`ValueError` if the shapes of `out` differ",
        ),
        "add_": Promise(
            "nothing; each sum is rounded once, to the dtype of its total. `grads` may be `totals`",
            writes="`totals`",
            errors="`ValueError` if the shapes differ",
        ),
        "grad_stats": Promise(
            "a `GradStats`: norms agree with a float64 computation to `norm_rtol` (inf with an inf, NaN with "
            "a NaN), flags are exact, 0 or 1"
        ),
        "multiply_": Promise(
            "nothing; products are float32's (float64's for float64), rounded once, to `product_ulps` steps",
            writes="`grads`; `found_inf`: exactly 1.0 if a gradient or product is not finite, else unchanged",
        ),
        "quantize": Promise(
            "a `Quantized`, bit for bit that of `amp_core.quantize`, or of its `packed()`: values, scales, "
            "largest magnitudes and exact counts, for every recipe, dtype, shape, dimension, seed and memory "
            "layout. A NaN may have other bits, and tensors other strides",
            errors="`TypeError`, `ValueError` and `IndexError` as `amp_core.quantize`",
        ),
        "update_scale_": Promise(
            "nothing; follows `amp_core.states.loss_scale.next_scale` bit for bit, an overflow being a "
            "`found_inf` above zero, which NaN is not; counts above 2^31 - 1 count as that, and without "
            "float64 on the device a scale may be one float32 step off",
            writes="`state`",
        ),
        "join_": Promise(
            "nothing; bit for bit as `Kernels.join_`",
            writes="`wides`",
            errors="`ValueError` if the shapes differ",
        ),
        "split_": Promise(
            "nothing; bit for bit as `Kernels.split_`, but for the payload of a NaN",
            writes="`lows`, `kept`; `wides`, with anything",
            errors="`ValueError` if the shapes differ",
        ),
        "round_": Promise(
            "nothing; bit for bit as `Kernels.round_`",
            writes="`lows`; `wides`, with anything",
            errors="`ValueError` if the shapes differ",
        ),
    }
)

SCALED_PRODUCTS: Mapping[str, Promise] = MappingProxyType(
    {
        "why_emulated": Promise(
            "words: why `multiply` emulates such a product; empty if the device has it. Equal each time",
        ),
        "multiply": Promise(
            "a new tensor in `accumulate`. Each element is within rounding of the exact product of what the "
            "operands stand for. For float32, that is `(2 k + 4) 2^-24` of the sum of the magnitudes of its "
            "`k` terms. An element is NaN where a row or column of the operands has a scale of NaN",
        ),
    }
)
