"""`materialize`: write the casts of a region into a model, so that it runs without one."""

from __future__ import annotations

import inspect
import operator
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from amp_core._torch.dispatcher import Overload, autograd_key, dispatcher_name, is_view, returns_tensors
from amp_core._torch.op_kernels import has_kernel, key_set, native_kernel
from amp_core._torch.tensors import is_dtensor
from amp_core.common.arguments import check_dtype, check_module, device_type_of
from amp_core.common.containers import tensors_in
from amp_core.common.fsdp import is_sharded
from amp_core.dispatch.activate import default_policy
from amp_core.dispatch.casting import Runner, make_runner
from amp_core.errors import AmpWarning, MaterializeError, PolicyError
from amp_core.plugin import get_backend
from amp_core.policy import OpPolicy, names
from amp_core.policy.recipes import RecipeRule
from amp_core.policy.rules import NATIVE, UNCHANGED
from amp_core.regions.direct_calls import call_directly
from amp_core.regions.graph_casts import store_casts, written_weights
from amp_core.regions.graph_check import check_graph, frozen, kept_buffers
from amp_core.regions.region import autocast


def materialize(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: OpPolicy | None = None,
    dtype: torch.dtype | None = None,
    device_type: str | None = None,
    dynamic_shapes: Any = None,
    check: bool = True,
) -> fx.GraphModule:
    """Return a model for inference that computes what `model` computes in a region, without a region.

    The casts of the region are part of the returned graph. A weight that the region uses only in low
    precision is stored in that dtype; other weights are shared with `model`. The graph consists of torch's
    own ops: ``torch.compile``, ``torch.export``, AOTInductor and ONNX need no amp-core.

    Results are bit-equal to ``model(*args, **kwargs)`` in ``autocast(device_type, dtype, policy=policy)``
    under ``torch.no_grad()``, with weights that require no gradients: for others, torch may choose kernels
    that round elsewhere. Regions inside the model keep their effect.

    Args:
        model: the model, in the mode (``eval()``) to be written down.
        args: example positional arguments; other shapes are accepted only as `dynamic_shapes` says.
        kwargs: example keyword arguments.
        policy: the op policy of the region; defaults to the device's own.
        dtype: the dtype of low-precision ops; defaults to the device's own.
        device_type: the region's device type; defaults to that of the first parameter.
        dynamic_shapes: as for ``torch.export.export``.
        check: run both models on copies of the example arguments and compare bit for bit the results, and
            what was written to the copies. Parameters, buffers and random generators are restored afterwards.
            Switch it off for models with random results or on devices whose kernels are not deterministic.

    Returns:
        The model as a ``torch.fx.GraphModule``, with frozen weights.

    Raises:
        MaterializeError: the model cannot be written as one graph (the message names the line), is sharded or
            wrapped in DistributedDataParallel, is compiled by TorchScript, is not initialised, or the check
            failed.
        PolicyError: `policy` is for another device or has recipes, or a region inside the model has a policy
            of its own.
        BackendNotFoundError: no backend serves the device type.
        ValueError: `device_type` is no string, device or tensor.
        TypeError: `model` is not a module, `dtype` not a dtype, `args` no sequence or `kwargs` no mapping.

    Example:
        >>> import torch, amp_core
        >>> model = torch.nn.Linear(2, 2).eval()
        >>> low = amp_core.materialize(model, (torch.ones(1, 2),), dtype=torch.bfloat16)
        >>> low.weight.dtype, low(torch.ones(1, 2)).dtype
        (torch.bfloat16, torch.bfloat16)
    """
    check_module(model, "materialize")
    if dtype is not None:
        check_dtype(dtype, "dtype")
    if not isinstance(args, Sequence):  # a tensor would be taken apart into its rows
        raise TypeError(f"args= must be a tuple of arguments, such as (x,), not {type(args).__name__}.")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"kwargs= must map names to arguments, not {kwargs!r}.")
    kwargs = dict(kwargs or {})
    _check_whole(model)
    if device_type is None:
        first = next(model.parameters(), None)
        device_type = "cpu" if first is None else first.device.type
    # Spelt out, because a region without a policy takes that of a region around the call.
    policy = default_policy(get_backend(device_type_of(device_type))) if policy is None else policy
    # The cast cache would hand tensors of one trace to the next.
    region = autocast(device_type, dtype, cache_enabled=False, policy=policy)
    in_force = cast("OpPolicy", region._policy)  # with the recipes of dtype=torch.float8_e4m3fn
    quantised = sorted({rule for rule in in_force.rules.values() if isinstance(rule, RecipeRule)})
    if quantised:
        raise PolicyError(
            f"materialize writes casts down, and no recipes, such as {quantised[0]!r} of {in_force!r}. Give "
            f"the ops another rule, such as 'lower_precision_fp', or run the model in a region, with "
            f"cached_casts(model, persistent=True)."
        )
    try:
        with frozen(model), kept_buffers(model):  # torch.export leaves fake tensors in those that it replaces
            graph_module, in_spec = _traced(model, args, kwargs, dynamic_shapes, region, in_force)
    except PolicyError:
        raise
    except Exception as error:
        raise MaterializeError(
            f"{_place(error, model)}{type(model).__name__} cannot be one graph: "
            f"{_advice(error, model, (args, kwargs))}"
        ) from error
    store_casts(graph_module)
    ops = {names.full_name(n.target) for n in graph_module.graph.nodes if isinstance(n.target, Overload)}
    written = _written(graph_module)
    graph_module = call_directly(graph_module, in_spec)
    for name in ("train", "eval"):  # torch.export forbids both; this graph has one mode
        graph_module.__dict__.pop(name, None)
    graph_module.eval()
    if check:
        check_graph(graph_module, model, (tuple(args), kwargs), region, in_force, ops, written)
    return graph_module


def _check_whole(model: nn.Module) -> None:
    """Raise MaterializeError if no trace can see all of `model`; one would leave FSDP broken."""
    for name, module in model.named_modules():
        where = f"The module {name!r}" if name else "The model"
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise MaterializeError(
                f"{where} is a DistributedDataParallel, which cannot be part of a graph: pass its `.module`."
            )
        own = nn.Module.parameters(module, recurse=False)  # a model's own method may take no arguments
        if is_sharded(module) or any(map(is_dtensor, own)):
            raise MaterializeError(
                f"{where} is sharded, and a graph needs whole weights. Call materialize before the model is "
                f"sharded, or on a plain model that has loaded its full state dict."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise MaterializeError(
                f"{where} is compiled by TorchScript, which casts by rules of its own. Call materialize "
                f"before torch.jit.script or torch.jit.trace."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise MaterializeError(f"{name} is not initialised yet. Call the model once before materialize.")


def _traced(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    region: autocast,
    policy: OpPolicy,
) -> tuple[fx.GraphModule, Any]:
    """Return the graph of `model` with the casts of `region`, and the structure of its arguments."""
    with torch.no_grad(), region, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch's own use of it
        warnings.filterwarnings("ignore", "torch.export does not keep", AmpWarning)  # this region it does
        # The first trace keeps the ops above autocast, with the dtypes of the region; the second one runs
        # them through it, and so records its casts.
        program = torch.export.export(model, tuple(args), kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        _rule_resizes(program, policy)
        _decompose_unruled(program, policy)
        traced = program.run_decompositions({})
        while _decompose_unruled(traced, policy):  # parts may be composed of others themselves
            traced = traced.run_decompositions({})
        module: Any = traced.module()
    return module, program.call_spec.in_spec


def _written(module: fx.GraphModule) -> list[Tensor]:
    """Return the weights to which the graph writes: their memory is that of the traced model's."""
    return [operator.attrgetter(name)(module) for name in sorted(written_weights(module))]


def _decompose_unruled(program: torch.export.ExportedProgram, policy: OpPolicy) -> bool:
    """Have each op without a rule that torch composes of others run its parts above autocast.

    Returns:
        Whether there are any.
    """
    found = False
    for node, op in _calls(program):
        if is_view(op) or _is_resize(op):
            continue
        if not returns_tensors(op):  # a size that the model reads: each trace has it again
            continue
        name = dispatcher_name(op)
        ruled = policy.explain(op)[0].rule != UNCHANGED
        if not ruled and has_kernel(name, "CompositeImplicitAutograd"):
            node.target, found = _parts(name, autograd_key(policy.device_type)), True
    return found


def _rule_resizes(program: torch.export.ExportedProgram, policy: OpPolicy) -> None:
    """Have each resize that consists of one op take the rule of that op.

    Run in parts, it would read sizes as numbers, and so fix those of `dynamic_shapes`.
    """
    for node, op in _calls(program):
        if _is_resize(op):
            rule = policy.rules.get(f"{dispatcher_name(op).removesuffix('vec')}default", UNCHANGED)
            if rule not in (UNCHANGED, NATIVE):
                node.target = _under(make_runner(op, rule, policy.device_type))


def _calls(program: torch.export.ExportedProgram) -> Iterator[tuple[fx.Node, Overload]]:
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        if isinstance(node.target, Overload):
            yield node, node.target


def _is_resize(op: Overload) -> bool:
    return dispatcher_name(op).endswith(".vec")  # as upsample_nearest2d.vec


def _under(run: Runner) -> Callable[..., Any]:
    def resized(*args: Any, **kwargs: Any) -> Any:
        return run(None, args, kwargs)

    return resized


def _parts(name: str, key: str) -> Callable[..., Any]:
    kernel, keys = native_kernel(name, key), key_set(key)

    def parts(*args: Any, **kwargs: Any) -> Any:
        return kernel(keys, *args, **kwargs)

    parts.__name__ = f"parts_of_{name.replace('::', '_').replace('.', '_')}"
    return parts


def _place(error: BaseException, model: nn.Module) -> str:
    """Return the innermost line, in a file with a `forward` of `model`, from which `error` came."""
    methods = (getattr(type(module), "forward", None) for module in model.modules())
    forwards = {inspect.unwrap(method) for method in methods if method is not None}
    # The module of code that was made at run time, as that of torch.fx, is None.
    codes = {
        f.__code__
        for f in forwards
        if hasattr(f, "__code__") and not (f.__module__ or "").startswith("torch.")
    }
    files = {code.co_filename for code in codes}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f'{frame.filename}:{frame.lineno} in {frame.name}: "{frame.line}": '
    return ""


def _advice(error: BaseException, model: nn.Module, arguments: Any) -> str:
    """Return what torch.export says first, and what to do about it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sizes = [line[2:] for line in lines if line.startswith("- ")]
    if sizes and lines[0].startswith("Constraints violated"):
        return "\n".join(sizes) + _OTHER_SIZES
    advice = (lines[0] if lines else type(error).__name__) + _OTHER_FLOW
    kinds = {type(tensor).__name__ for tensor in tensors_in(arguments)} - {"Tensor", "Parameter"}
    if kinds:
        advice += f" Pass plain tensors: torch may not trace subclasses, as {', '.join(sorted(kinds))}."
    if any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        advice += " Pass use_cache=False to a language model."
    return advice


_OTHER_SIZES = (
    "\nLet dynamic_shapes= name only sizes for which one graph holds. A rule with a threshold, such as "
    "'lower_precision_fp above 8 MFLOP', has one for the calls above it, and another for the others."
)
_OTHER_FLOW = (
    "\nReplace control flow on values by torch.cond or torch.where, or materialize a submodule. Arguments "
    "and results must be tensors in plain containers."
)
