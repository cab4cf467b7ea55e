"""Rules for recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import ZERO, Label, Term, Value, along, pinned_value
from tu_symmetry.symmetry.rules import Call, register_rule

Samples = tuple[Label, str]  # the label of the axis of samples, and why it is pinned


@register_rule("lstm", "gru", "rnn_tanh", "rnn_relu", signs="follow")
def _recurrent(call: Call) -> list[Value]:
    ledger = call.ledger
    batch_first = bool(call.get("batch_first", False))
    value: Value = call.get("input", call.get("data"))  # the latter is packed: ``[steps of all sequences, features]``
    call.pin("batch_sizes", "lengths of sequences")
    value = views.mix(ledger, value, 1 if batch_first and value.ndim == 3 else 0, "time step")
    value = views.unnest(ledger, value, value.ndim - 1)
    samples = 0 if batch_first else 1
    batch = (value.labels[samples], value.reasons[samples]) if value.ndim == 3 else ((), "")
    directions = 2 if call["bidirectional"] else 1
    parameters: list[Value] = list(call["params"])
    layers = int(call["num_layers"])
    each = len(parameters) // (layers * directions)
    source = views.channel(ledger, value, value.ndim - 1)
    cells: list[Value] = []
    finals: list[Value] = []
    for layer in range(layers):
        outs = []
        for direction in range(directions):
            cell, out = _gates(call, source, *parameters[(layer * directions + direction) * each :][:each])
            outs.append(out)
            cells.append(cell)
            ledger.observe(cell)
            for state in _states(call):
                first = replace(views.take(ledger, state, 0, layer * directions + direction), zero=state.zero)
                batch = _tied_state(call, first, out if state.shape[-1] == out.shape[0] else cell, batch)
        finals += outs
        source = outs[0] if directions == 1 else views.concatenate(ledger, outs, 0)
    ndim = len(call.shape)
    laid = views.reshape(ledger, source, [1] * (ndim - 1) + [source.shape[0]])
    sequence = replace(laid, shape=call.shape, reasons=("time step",) * (ndim - 1) + laid.reasons[-1:])
    if value.ndim == 3:
        sequence = _of_samples(sequence, samples, batch)
    return [sequence, *(_final(call, k, finals if k == 1 else cells, batch) for k in range(1, len(call.outputs)))]


@register_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", signs="follow")
def _cell(call: Call) -> list[Value]:
    ledger = call.ledger
    value = views.unnest(ledger, call["input"], call["input"].ndim - 1)
    batch = (value.labels[0], value.reasons[0]) if value.ndim == 2 else ((), "")
    biases = [b for b in (call.get("b_ih"), call.get("b_hh")) if b is not None]
    cell, _ = _gates(call, views.channel(ledger, value, value.ndim - 1), call["w_ih"], call["w_hh"], *biases)
    for state in _states(call):
        batch = _tied_state(call, state, cell, batch)
    ledger.observe(cell)
    return [_of_cells(call, cell, shape, batch) for shape in call.outputs]


@register_rule("_pack_padded_sequence", signs="follow")
def _pack(call: Call) -> list[Value]:
    ledger, value = call.ledger, call["input"]
    call.pin("lengths", "lengths of sequences")
    for _ in range(2):
        value = views.drop(ledger, views.mix(ledger, value, 0, "packed"), 0)
    laid = views.reshape(ledger, value, (1, *value.shape))
    packed = replace(laid, shape=call.shape, reasons=("packed", *laid.reasons[1:]))
    return [packed, pinned_value(call.outputs[1], "lengths of sequences")]


def _states(call: Call) -> Sequence[Value]:
    return call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]


def _gates(call: Call, source: Value, w_ih: Value, w_hh: Value, *others: Value) -> tuple[Value, Value]:
    """Fresh hidden units, which index the rows of every gate and do not scale; the input's units index the columns.

    Beside them those of the output, which are the same where no projection follows the biases. The signs of units turn
    the rows of the gate that tanh follows, the last of a GRU's and the third of an LSTM's.
    """
    ledger, biases = call.ledger, [b for b in others if b.ndim == 1]
    gates = {"lstm": 4, "gru": 3}.get(call.name.removesuffix("_cell"), 1)
    hidden = w_hh.shape[0] // gates
    units = ledger.fresh_units(hidden)
    slots = (np.tile(units, gates), np.repeat(-1 - np.arange(gates), hidden))[: 2 if gates > 1 else 1]
    turned = np.full(hidden, ZERO)
    if ledger.signs and "relu" not in call.name and len(others) == len(biases):
        turned = ledger.fresh_variables((hidden,))
    rows = np.full((gates, hidden), ZERO)
    rows[min(gates - 1, 2)] = turned
    for w in (w_ih, w_hh, *biases):
        terms = w.scale if w is not w_ih else tuple(t for t in w.scale if t[1].shape[0] > 1)
        signs = [(1.0, along(rows.reshape(-1), 0, w.ndim)), *([(1.0, along(turned, 1, 2))] if w is w_hh else [])]
        ledger.equate(terms, tuple(signs) if ledger.signs else ())
        ledger.relabel(w, 0, tuple(along(s, 0, w.ndim) for s in slots))
    out = units
    for projection in others[len(biases) :]:
        out = ledger.fresh_units(projection.shape[0])
        ledger.pin_scale(projection.scale)
        ledger.unify(projection.labels[0], (out.reshape(-1, 1),))
        ledger.unify(projection.labels[1], (units.reshape(1, -1),))
    ledger.unify(w_hh.labels[1], (out.reshape(1, -1),))
    incoming = tuple(c.reshape(1, -1) for c in source.labels[0])
    ledger.unify(w_ih.labels[1], incoming, "", source.reasons[0])
    terms = tuple((c, v.reshape(1, -1)) for c, v in source.scale)
    ledger.pin_scale((*(t for t in w_ih.scale if t[1].shape[1] > 1), *terms))
    scale: tuple[Term, ...] = ((1.0, turned),) if ledger.signs else ()
    cell, shown = (Value((len(own),), ((own,),), ("",), scale if own is units else ()) for own in (units, out))
    return cell, shown


def _of_samples(value: Value, axis: int, batch: Samples) -> Value:
    label = tuple(along(c.reshape(-1), axis, value.ndim) for c in batch[0])
    return value.with_axis(axis, label=label, reason=batch[1])


def _of_cells(call: Call, cell: Value, shape: tuple[int, ...], batch: Samples) -> Value:
    laid = views.reshape(call.ledger, cell, [1] * (len(shape) - 1) + [cell.shape[0]])
    states = replace(laid, shape=shape)
    return _of_samples(states, len(shape) - 2, batch) if len(shape) > 1 and batch[0] else states


def _final(call: Call, position: int, states: list[Value], batch: Samples) -> Value:
    """The states after the last step: indexed by the hidden units where there is one layer, pinned where several."""
    shape = call.outputs[position]
    if len(states) == 1:
        return _of_cells(call, states[0], shape, batch)
    reason = "final states of several layers are stacked"
    if position in call.used:
        for state in states:
            call.ledger.pin(state, reason)
        call.ledger.pin_label(batch[0], reason)
    return pinned_value(shape, reason)


def _tied_state(call: Call, state: Value, cell: Value, batch: Samples) -> Samples:
    """Tie an initial state, ``[samples, hidden]`` or ``[hidden]``, to a cell; the samples to go on with."""
    ledger = call.ledger
    if not state.zero:
        ledger.equate(state.scale, tuple((c, along(v, state.ndim - 1, state.ndim)) for c, v in cell.scale))
    state = replace(state, scale=())
    ((units,),) = cell.labels
    for axis in range(state.ndim):
        state = views.unnest(ledger, state, axis)
    ledger.unify(state.labels[-1], (along(units, state.ndim - 1, state.ndim),), state.reasons[-1], "")
    if state.ndim < 2 or state.shape[0] == 1:
        return batch
    label, whole = (tuple(c.reshape(-1) for c in own) for own in (state.labels[0], batch[0]))
    return ledger.unify(whole, label, batch[1], state.reasons[0]), batch[1] or state.reasons[0]
