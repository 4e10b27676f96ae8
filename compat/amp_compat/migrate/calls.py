"""Convert arguments from deprecated signatures to those that take a device."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from amp_compat.migrate.names import Legacy

AUTOCAST_ORDER = ("enabled", "dtype", "cache_enabled")


class CannotConvertError(Exception):
    """The call cannot be rewritten safely; the message says why and what to write instead."""


def convert_args(legacy: Legacy, args: Sequence[cst.Arg], quote: str) -> list[cst.Arg]:
    """Return the arguments for a call to `legacy`'s successor.

    Args:
        legacy: the deprecated object that is called.
        args: its arguments.
        quote: the quotation mark that the file uses.

    Raises:
        CannotConvertError: the meaning of the arguments is known only at run time.
    """
    device = f"{quote}{legacy.device}{quote}"
    if legacy.name in {"custom_fwd", "custom_bwd"}:
        return _custom(args, device)
    if passes_device(args):
        return _with_device(legacy, args)
    if legacy.name == "GradScaler":
        return prepend(args, cst.Arg(cst.SimpleString(device)))
    if legacy.name == "_cast":
        return _cast_args(args, device)
    if legacy.name == "autocast":
        return prepend(name_positional(args), cst.Arg(cst.SimpleString(device)))
    raise CannotConvertError(f"{legacy.name} is not called with a device")


def name_positional(args: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Turn positional arguments of `autocast` into keywords: its successor orders them differently."""
    named: list[cst.Arg] = []
    for position, arg in enumerate(args):
        if arg.star == "*":
            raise CannotConvertError(
                "`*args` cannot be rewritten: the successor takes (device_type, dtype, enabled, "
                "cache_enabled); pass them by keyword"
            )
        if arg.keyword is not None or arg.star:
            named.append(arg)
            continue
        if position >= len(AUTOCAST_ORDER):
            raise CannotConvertError("more positional arguments than the deprecated signature has")
        named.append(_named(arg, AUTOCAST_ORDER[position]))
    return named


def _named(arg: cst.Arg, keyword: str) -> cst.Arg:
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    value = arg.value
    if isinstance(value, (cst.NamedExpr, cst.GeneratorExp)) and not value.lpar:  # a keyword needs parentheses
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return arg.with_changes(keyword=cst.Name(keyword), equal=equal, value=value)


def has_positional(args: Sequence[cst.Arg]) -> bool:
    """Return whether an argument is passed by position."""
    return any(arg.keyword is None and arg.star != "**" for arg in args)


def gives_dtype(args: Sequence[cst.Arg]) -> bool:
    """Return whether a call of any `autocast` passes the dtype, which is the second argument of all."""
    return keyword_of(args, "dtype") is not None or len([a for a in args if has_positional([a])]) > 1


def keyword_of(args: Sequence[cst.Arg], name: str) -> cst.BaseExpression | None:
    """Return the value of the keyword `name`, or None."""
    return next((a.value for a in args if a.keyword is not None and a.keyword.value == name), None)


def prepend(args: Sequence[cst.Arg], first: cst.Arg) -> list[cst.Arg]:
    """Put `first` before `args`, on a separate line if the call has one argument per line."""
    if not args:
        return [first]
    gap: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace(" ")
    separators = [a.comma for a in args[:-1] if isinstance(a.comma, cst.Comma)]
    if separators:
        gap = _without_comments(separators[0].whitespace_after)
    return [first.with_changes(comma=cst.Comma(whitespace_after=gap)), *args]


def _without_comments(gap: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    """Return only the line break and indentation."""
    if isinstance(gap, cst.ParenthesizedWhitespace):
        return gap.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=())
    return gap


def _custom(args: Sequence[cst.Arg], device: str) -> list[cst.Arg]:
    if keyword_of(args, "device_type") is not None:
        return list(args)
    new = _named(cst.Arg(cst.SimpleString(device)), "device_type")
    count = sum(1 for a in args if a.keyword is None and a.star != "**")
    head, tail = list(args[:count]), list(args[count:])
    if tail or not head:
        return head + prepend(tail, new)
    last = head[-1]
    comma = last.comma if isinstance(last.comma, cst.Comma) else cst.MaybeSentinel.DEFAULT
    head[-1] = last.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return [*head, new.with_changes(comma=comma)]


def _cast_args(args: Sequence[cst.Arg], device: str) -> list[cst.Arg]:
    if len(args) != 2 or any(a.star for a in args):
        raise CannotConvertError("`_cast` takes (value, device_type, dtype) now")
    new = cst.Arg(cst.SimpleString(device))
    if args[1].keyword is not None:
        new = _named(new, "device_type")
    return [args[0], *prepend(args[1:], new)]


def passes_device(args: Sequence[cst.Arg]) -> bool:
    """Return whether the call passes a device, although the deprecated name takes none."""
    if keyword_of(args, "device_type") is not None or keyword_of(args, "device") is not None:
        return True
    return bool(args) and args[0].keyword is None and isinstance(args[0].value, cst.SimpleString)


def _with_device(legacy: Legacy, args: Sequence[cst.Arg]) -> list[cst.Arg]:
    if legacy.name == "autocast" and sum(a.keyword is None for a in args) > 2:
        raise CannotConvertError(
            "the deprecated name takes no device, but this call passes one; the other arguments are ambiguous"
        )
    return list(args)
