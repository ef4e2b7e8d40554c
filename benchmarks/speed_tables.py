"""Tables of times: the demo, layers, other libraries, scaling, small sets, operators and networks."""

from __future__ import annotations

from result_files import Result, gpus_first, markdown, number, origin


def demo_table(results: list[Result]) -> str:
    """The demo's figures: of a GPU if there are any, else of a CPU."""
    having = [r for r in results if "demo" in r]
    if not having:
        return "No demo figures have been recorded yet; `make demo` shows those of your machine."
    best = max(having, key=lambda r: any(row["device"] == "cuda" for row in r["demo"]["rows"]))
    part = best["demo"]
    scene = part["scene"]
    rows = [
        [
            row["mode"],
            row["device"],
            row["tile"],
            row["accumulator"],
            row["decided_by"],
            number(row["forward_ms"], ".3g", " ms"),
            number(row["backward_ms"], ".3g", " ms"),
            number(row["rel_l2"], ".1e"),
            number(row["max_eta"], ".1e"),
            number(row["max_rel"], ".1e"),
        ]
        for row in part["rows"]
    ]
    header = [
        "mode",
        "device",
        "tile",
        "accumulator",
        "decided by",
        "forward",
        "backward",
        "rel-L2",
        "max eta",
        "max_rel",
    ]
    caption = (
        f"{best['card']}, {scene['voxels']:,} voxels with {scene['neighbours_3x3x3']:.1f} neighbours each; "
        f"{origin(part, part['environment']['torch'])}."
    )
    return f"{markdown(header, rows)}\n\n{caption}"


def _fastest(rows: list[Result], lib: str, what: str) -> float | None:
    return min((row[what] for row in rows if row["lib"] == lib and what in row), default=None)


def _shape(row: Result) -> str:
    """Such as '64x64 fp16', and for other kernels than 3x3x3 '64x64 fp16, K = 8, stride 2 transposed'."""
    kernel, stride = row.get("kernel", 3), row.get("stride", 1)
    other = f", K = {kernel**3}" + (f", stride {stride}" if stride > 1 else "")
    other += " transposed" if row.get("transposed") else ""
    return f"{row['ci']}x{row['co']} {row['dtype']}{other if (kernel, stride) != (3, 1) else ''}"


def _by_shape(rows: list[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for row in rows:
        groups.setdefault(_shape(row), []).append(row)
    return groups


def speed_table(results: list[Result], parts: str = "scenes") -> str:
    """voxmma (fp32 accumulator) against spconv in the same run, per card and scene.

    Args:
        parts: "scenes", or "smaller" for those of runs in which tiles were chosen as for a smaller card.
    """
    blocks = []
    for result in results:
        for scene, part in result.get(parts, {}).items():
            rows = []
            rooflines = any("forward_of_floor" in row for row in part["rows"])
            for shape, group in _by_shape(part["rows"]).items():
                ours = next(
                    (row for row in group if (row["lib"], row["variant"]) == ("voxmma", "fp32")), None
                )
                if ours is None:
                    continue
                peer = [_fastest(group, "spconv", what) for what in ("forward_ms", "backward_ms")]
                times = [ours["forward_ms"], ours["backward_ms"]]
                ratios = [t / p if p else None for t, p in zip(times, peer, strict=True)]
                theirs = min(
                    (row for row in group if row["lib"] == "spconv"),
                    key=lambda row: row["forward_ms"],
                    default=None,
                )
                rows.append(
                    [
                        shape,
                        *(
                            cell
                            for what, t, p, ratio in zip(
                                ("forward", "backward"), times, peer, ratios, strict=True
                            )
                            for cell in (
                                number(t, ".3f"),
                                *([number(ours.get(f"{what}_of_floor"), ".0%")] if rooflines else []),
                                number(p, ".3f"),
                                number(ratio, ".2f"),
                            )
                        ),
                        number(ours.get("map_ms"), ".2f"),
                        number(ours.get("map_mib"), ".0f"),
                        number(ours["rel_l2"][0], ".1e"),
                        number(theirs["rel_l2"][0] if theirs else None, ".1e"),
                        number(ours["max_eta"][0], ".1e"),
                    ]
                )
            if not rows:
                continue
            of_roofline = ["of roofline"] if rooflines else []
            header = [
                "C_in x C_out", "forward ms", *of_roofline, "spconv", "ratio", "backward ms", *of_roofline,
                "spconv", "ratio", "map build ms", "map MiB", "rel-L2", "spconv's", "max eta",
            ]  # fmt: skip
            counts = f"{part['voxels']:,} voxels, {part['pairs'] / part['voxels']:.1f} neighbours each"
            capability, shared_memory = part.get("limits", (None, None))
            like = " as if of capability " + ".".join(map(str, capability)) if capability else ""
            like += f" with {shared_memory:,} bytes of shared memory" if shared_memory else ""
            caption = f"**{scene}** on {result['card']}{like}: {counts}; {origin(part, part['torch'])}."
            blocks.append(f"{caption}\n\n{markdown(header, rows)}")
    return "\n\n".join(blocks) or "No GPU figures have been recorded yet."


def peers_table(results: list[Result]) -> str:
    """Every library of benchmarks/peerbench.py, per card and scene."""
    blocks = []
    for result in results:
        for scene, part in result.get("scenes", {}).items():
            if "rates" not in part:
                continue
            rows = []
            for shape, group in _by_shape(part["rows"]).items():
                for row in group:
                    cells = [shape, f"{row['lib']} {row['version']}".strip() + f", {row['variant']}"]
                    for op in ("forward", "dgrad", "wgrad", "backward"):
                        cells.append(number(row.get(f"{op}_ms"), ".3f"))
                        cells.append(number(row.get(f"{op}_of_floor"), ".0%"))
                    for name, pattern in (
                        ("forward_cold_ms", ".3f"), ("backward_cold_ms", ".3f"), ("step_ms", ".3f"),
                        ("host_us", ".0f"), ("map_ms", ".2f"), ("first_ms", ".2f"), ("map_mib", ".0f"),
                        ("step_peak_mib", ".0f"),
                    ):  # fmt: skip
                        cells.append(number(row.get(name), pattern))
                    cells += [
                        " ".join(f"{value:.0e}" for value in row[name]) for name in ("rel_l2", "max_eta")
                    ]
                    rows.append(cells)
            header = [
                "layer", "library", "forward ms", "of roofline", "dgrad ms", "of roofline", "wgrad ms",
                "of roofline", "backward ms", "of roofline", "cold forward ms", "cold backward ms", "step ms",
                "host us", "map ms", "first ms", "map MiB", "peak MiB", "rel-L2 y dx dW", "max eta y dx dW",
            ]  # fmt: skip
            rates = part["rates"]
            reach = ", ".join(f"{name} {value:.4g} TFLOP/s" for name, value in rates["tflops"].items())
            caption = (
                f"**{scene}** on {result['card']}: {part['voxels']:,} voxels; measured limits {reach} and "
                f"{rates['bandwidth']:.0f} GB/s; {origin(part, part['torch'])}."
            )
            reasons: dict[str, list[str]] = {}
            for label, why in part["failed"].items():
                reasons.setdefault(why, []).append(label)
            failed = "".join(f"\n* {why}: {', '.join(labels)}" for why, labels in reasons.items())
            failed = f"\n\nWithout figures:\n{failed}" if failed else ""
            blocks.append(f"{caption}\n\n{markdown(header, rows)}{failed}")
    return "\n\n".join(blocks) or "No run of benchmarks/peerbench.py has been recorded yet."


def scaling_table(results: list[Result]) -> str:
    """Time a pair by voxels and channels, per card."""
    blocks = []
    for result in (r for r in results if "scaling" in r):
        part = result["scaling"]
        rows = []
        for row in part["rows"]:
            head = [str(row["channels"]), f"{row['voxels']:,}"]
            if "error" in row:
                rows.append([*head, row["error"], *[""] * 9])
                continue
            cells = [f"{row['map_ns_a_voxel']:.2f}"]
            for op in ("forward", "dgrad", "wgrad"):
                cells += [
                    f"{row[f'{op}_ms']:.3f}",
                    f"{row[f'{op}_ps_a_pair']:.3g}",
                    f"{row[f'{op}_of_floor']:.0%}",
                ]
            rows.append([*head, *cells, f"{row['max_eta']:.1e}"])
        header = ["C", "voxels", "map ns a voxel"]
        for op in ("forward", "dgrad", "wgrad"):
            header += [f"{op} ms", "ps a pair", "of roofline"]
        growth = [
            [str(line["channels"]), *(number(line[op], ".2f") for op in ("forward", "dgrad", "wgrad"))]
            for line in part["growth"]
        ]
        caption = f"**{result['card']}**, {part['dtype']}; {origin(part, part['environment']['torch'])}."
        note = "Time a pair at the largest size over the least at a smaller one:"
        moves = markdown(["C", "forward", "dgrad", "wgrad"], growth)
        blocks.append(f"{caption}\n\n{markdown([*header, 'max eta'], rows)}\n\n{note}\n\n{moves}")
    return "\n\n".join(blocks) or "No run of benchmarks/scaling.py has been recorded yet."


def small_sets_table(results: list[Result]) -> str:
    """A layer of ours by voxels and channels, per card."""
    blocks = []
    for result in gpus_first(results, "small_sets"):
        part = result["small_sets"]
        ours = [row for row in part["rows"] if row["lib"] == "voxmma"]
        rows = [
            [
                f"{row['voxels']:,}",
                str(row["channels"]),
                *(f"{row[name]:.1f}" for name in ("forward_kernel_us", "forward_us", "step_us")),
                str(row["parts"]),
            ]
            for row in sorted(ours, key=lambda row: (row["voxels"], row["channels"]))
        ]
        header = ["voxels", "C", "forward kernel us", "forward us", "step us", "parts"]
        caption = _medians(result["card"], part, ", ".join(sorted({row["dtype"] for row in ours})))
        blocks.append(f"{caption}\n\n{markdown(header, rows)}")
    return "\n\n".join(blocks) or "No run of benchmarks/small_sets.py has been recorded yet."


def operators_table(results: list[Result]) -> str:
    """Coordinate sets, kernel maps, pooling and what only moves data, per card and scene."""
    blocks = []
    for result in results:
        for scene, part in result.get("operators", {}).items():
            made = [
                [
                    row["what"],
                    number(row["ms"], ".3f"),
                    number(row["least_ms"], ".3f"),
                    number(row["waits"], "d"),
                ]
                for row in part["maps"]
            ]
            pools, reasons = [], {}
            for row in part["pools"]:
                window = f"{row['kind']}, k{row['kernel']}s{row['stride']}"
                cells = [window, f"{row['channels']} {row['dtype']}", number(row["floor_ms"], ".4f")]
                for op in ("forward", "backward"):
                    cells += [
                        number(row[f"{op}_ms"], ".4f"),
                        number(row[f"{op}_over_floor"], ".2f"),
                        number(row.get(f"spconv_{op}_ms"), ".4f"),
                    ]
                pools.append(cells)
                if "spconv_error" in row:
                    reasons.setdefault(row["spconv_error"], []).append(f"{window}, C = {row['channels']}")
            sizes = " and ".join(
                f"{part[f'{name}_bytes'] / 2**20:.1f} MiB of {text}"
                for name, text in (("map", "3x3x3 map"), ("index", "coordinate index"))
            )
            caption = (
                f"**{scene}** on {result['card']}: {part['voxels']:,} voxels, {sizes}; copy "
                f"{part['bandwidth']:.0f} GB/s; {origin(part, part['torch'])}."
            )
            header = ["pooling", "C", "roofline ms"]
            theirs = f"spconv {part['spconv'] or ''}".strip()
            for op in ("forward", "backward"):
                header += [f"{op} ms", "time / roofline", theirs]
            tables = [
                markdown(["what is made", "median ms", "least ms", "waits for the GPU"], made),
                markdown(header, pools),
                _moves_table(part["moves"]),
            ]
            failed = [f"* {why}: {', '.join(labels)}" for why, labels in reasons.items()]
            tables += ["spconv failed:", "\n".join(failed)] if failed else []
            blocks.append("\n\n".join([caption, *tables]))
    return "\n\n".join(blocks) or "No run of `benchmarks/operators.py` has been recorded yet."


_NETWORKS = {
    "spunet": "SpUNet",
    "minkunet34c": "MinkUNet34C",
    "second": "SECOND backbone",
    "resnet21d": "ResNet21D",
    "vae": "VAE decoder",
}


def _network(row: Result) -> str:
    """Such as 'SpUNet, indoor_scannet x 4', 'conv 64, grid_10000'."""
    name = row["network"]
    title = (
        f"3x3x3, C = {name.removeprefix('conv')}" if name.startswith("conv") else _NETWORKS.get(name, name)
    )
    return f"{title}, {row['scene']}" + (f" x {row['batch']}" if row.get("batch", 1) > 1 else "")


def _medians(card: str, part: Result, dtype: str) -> str:
    return f"**{card}**, {dtype}, medians of {part['repeats']}; {origin(part, part['environment']['torch'])}."


def _networks_caption(result: Result) -> str:
    part = result["networks"]
    return _medians(result["card"], part, part["dtype"])


def networks_table(results: list[Result]) -> str:
    """Whole networks, without single layers: ours, as an engine, too, and in brackets our part of spconv's in
    the same run."""
    blocks = []
    for result in gpus_first(results, "networks"):
        rows = [row for row in result["networks"]["rows"] if row["network"] in _NETWORKS]
        theirs = {_network(row): row for row in rows if row["lib"] == "spconv"}
        engines = {_network(row): row for row in rows if row["lib"] == "voxmma-engine"}
        cells = []
        for row in (row for row in rows if row["lib"] == "voxmma" and "infer_ms" in row):
            peer, line = theirs.get(_network(row), {}), [_network(row), f"{row['voxels']:,}"]
            inference = [("infer_ms", ".2f"), ("gpu_ms", ".2f"), ("infer_mib", ".0f")]
            training = [("train_ms", ".1f"), ("train_gpu_ms", ".2f"), ("train_mib", ".0f")]
            engine = engines.get(_network(row), {})
            figures = [(engine, *figure) for figure in inference] if engines else []
            figures += [(row, *figure) for figure in (*inference, *training)]
            for source, what, pattern in figures:
                ours, other = source.get(what), peer.get(what)
                ratio = f" ({ours / other:.2f})" if ours is not None and other else ""
                line.append(number(ours, pattern) + ratio)
            cells.append([*line, number(row["rel_l2"], ".1e"), number(peer.get("rel_l2"), ".1e")])
        header = ["network, scene", "voxels"]
        for name in (*(["engine"] if engines else []), "infer", "train"):
            header += [f"{name} ms", "GPU ms", "MiB"]
        versions = sorted({row["version"] for row in theirs.values()})
        caption = _networks_caption(result)
        if theirs:
            caption += f" In brackets: part of what spconv {', '.join(versions)} takes in the same run."
        if cells:
            blocks.append(f"{caption}\n\n{markdown([*header, 'rel-L2', 'spconv'], cells)}")
    return "\n\n".join(blocks) or "No run of `benchmarks/networks.py` has been recorded yet."


def overview_table(results: list[Result]) -> str:
    """Wall times of whole networks in every library, per GPU: inference and training."""
    blocks = []
    for result in (r for r in results if "networks" in r and r.get("arch") != "cpu"):
        rows = [row for row in result["networks"]["rows"] if row["network"] in _NETWORKS]
        rows.sort(key=lambda row: list(_NETWORKS).index(row["network"]))
        having = {what: _libraries(rows, what) for what in ("infer_ms", "train_ms")}
        columns = [(what, lib) for what, libs in having.items() for lib in libs]
        lines = []
        for name in dict.fromkeys(_network(row) for row in rows):
            here = {row["lib"]: row for row in rows if _network(row) == name}
            figures = [number(here.get(lib, {}).get(what), ".2f") for what, lib in columns]
            if set(figures) != {"–"}:
                lines.append([name, f"{max(row['voxels'] for row in here.values()):,}", *figures])
        titles = [f"{what.removesuffix('_ms')} ms: {having[what][lib]}" for what, lib in columns]
        if lines:
            table = markdown(["network, scene", "voxels", *titles], lines)
            blocks.append(f"{table}\n\n{_networks_caption(result)}")
    return "\n\n".join(blocks) or "No run of `benchmarks/networks.py` has been recorded yet."


def _libraries(rows: list[Result], what: str) -> dict[str, str]:
    """Libraries that have a figure, ours first, with their titles."""
    ours = ("voxmma-engine", "voxmma")
    found = {row["lib"]: f"{row['lib']} {row['version']}".strip() for row in rows if what in row}
    names = [lib for lib in ours if lib in found] + sorted(set(found) - {*ours})
    return {lib: lib if lib in ours else found[lib] for lib in names}


def host_times_table(results: list[Result]) -> str:
    """Least times of small calls, per card."""
    blocks = []
    for result in gpus_first(results, "host_times"):
        part = result["host_times"]
        rows = [[row["what"], f"{row['us']:.1f}"] for row in part["rows"]]
        caption = (
            f"**{result['card']}**: {part['voxels']} voxels, C = {part['channels']}; "
            f"{origin(part, part['environment']['torch'])}."
        )
        blocks.append(f"{caption}\n\n{markdown(['call', 'us'], rows)}")
    return "\n\n".join(blocks) or "No run of `benchmarks/host_times.py` has been recorded yet."


def _without_figures(part: Result, labels: dict[str, list[str]]) -> list[str]:
    """What is written below a table about rows and libraries that have no figures."""
    for lib, why in part.get("absent", {}).items():
        labels.setdefault(why, []).append(lib)
    lines = [f"* {why}: {', '.join(names)}" for why, names in labels.items()]
    return ["Without figures:", "\n".join(lines)] if lines else []


def reproducible_table(results: list[Result]) -> str:
    """Whether trainings repeat bit by bit, per card."""
    blocks = []
    for result in gpus_first(results, "reproducible"):
        part, rows, reasons = result["reproducible"], [], {}
        for row in part["rows"]:
            name = f"{row['lib']} {row['version']}".strip()
            setting = f"{_network(row)}, {row['optimiser']}, {row['steps']} steps"
            for kind in ("error", "unsupported"):
                if kind in row:
                    reasons.setdefault(row[kind], []).append(f"{name}, {setting}, {row['processes']}")
            if "equal" not in row:
                continue
            same = row["equal"] and row["equal_resumed"]
            first = "–" if row["first_step"] is None else str(row["first_step"])
            apart = ["–", "–"] if same else [f"{row[key]:.1e}" for key in ("weights_apart", "loss_apart")]
            agree = "–" if row["processes"] == 1 else _yes(row["ranks_agree"])
            cells = [name, str(row["processes"]), setting, _yes(row["equal"]), _yes(row["equal_resumed"])]
            rows.append([*cells, first, *apart, agree])
        header = [
            "library", "processes", "training", "equal", "equal when resumed", "first step that differs",
            "weights apart", "loss apart", "processes agree",
        ]  # fmt: skip
        caption = f"**{result['card']}**; {origin(part, part['environment']['torch'])}."
        blocks.append("\n\n".join([caption, markdown(header, rows), *_without_figures(part, reasons)]))
    return "\n\n".join(blocks) or "No run of `benchmarks/reproducible.py` has been recorded yet."


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def ddp_table(results: list[Result]) -> str:
    """Training steps under DDP against those of one process, per card."""
    blocks = []
    for result in gpus_first(results, "ddp"):
        part, rows, reasons = result["ddp"], [], {}
        for row in part["rows"]:
            name = f"{row['lib']} {row['version']}".strip()
            if "error" in row:
                reasons.setdefault(row["error"], []).append(f"{name}, {_network(row)}")
            if "ddp_ms" not in row:
                continue
            cells = [_network(row), f"{row['voxels']:,}", name, str(row["processes"])]
            cells += [row["options"], *(f"{row[key]:.2f}" for key in ("alone_ms", "beside_ms", "ddp_ms"))]
            cells += [f"{row[key]:.2f}" for key in ("efficiency", "of_beside")]
            rows.append([*cells, _yes(row["gradients_agree"]) if "gradients_agree" in row else "–"])
        header = [
            "network, scene", "voxels", "library", "processes", "options", "alone ms", "side by side ms",
            "DDP ms", "efficiency", "of side by side", "gradients agree",
        ]  # fmt: skip
        caption = (
            f"**{result['card']}**, medians of {part['rounds']} rounds of {part['steps']} steps; "
            f"{origin(part, part['environment']['torch'])}."
        )
        blocks.append("\n\n".join([caption, markdown(header, rows), *_without_figures(part, reasons)]))
    return "\n\n".join(blocks) or "No run of `benchmarks/ddp.py` has been recorded yet."


def upstream_table(results: list[Result]) -> str:
    """Agreement and times of unmodified networks of other repositories, per card."""
    blocks = []
    for result in gpus_first(results, "upstream"):
        part, rows = result["upstream"], []
        timed = any("voxmma_ms" in row for row in part["rows"])
        for row in part["rows"]:
            cells = [row["repository"], row["network"], number(row.get("voxels"), ","), row["dtype"]]
            cells += [row.get("reference", "–"), number(row["difference"], ".1e")]
            cells.append("–" if row["agrees"] is None else f"{_yes(row['agrees'])} ({row['tolerance']:g})")
            if timed:
                times = [row.get("voxmma_ms"), row.get("spconv_ms")]
                cells += [number(ms, ".2f") for ms in times]
                cells.append("–" if None in times else f"{times[0] / times[1]:.2f}")
                rest = [row[key] for key in ("voxmma_rest_ms", "spconv_rest_ms") if key in row]
                cells.append(number(min(rest, default=None), ".2f"))
            rows.append([*cells, row["note"].replace("|", "\\|")])
        header = [
            "repository",
            "network",
            "voxels",
            "dtype",
            "compared with",
            "difference",
            "agrees (within)",
        ]
        header += ["ms", "spconv ms", "ratio", "rest ms"] if timed else []
        medians = f", medians of {part['repeats']} forwards on new coordinates" if timed else ""
        caption = f"**{result['card']}**{medians}; {origin(part, part['environment']['torch'])}."
        blocks.append(f"{caption}\n\n{markdown([*header, 'note'], rows)}")
    return "\n\n".join(blocks) or "No run of `benchmarks/upstream.py` has been recorded yet."


def _in_a_row(row: Result) -> str:
    """Milliseconds of a frame among several in a row, and the share of them that the GPU is idle."""
    if "stream_ms" not in row:
        return "–"
    return f"{row['stream_ms']:.3f} ({max(0.0, 1 - row['gpu_ms'] / row['stream_ms']):.0%})"


def network_rows_table(results: list[Result]) -> str:
    """Every row of benchmarks/networks.py, per card."""
    blocks = []
    for result in gpus_first(results, "networks"):
        rows, reasons = [], {}
        for row in result["networks"]["rows"]:
            name = f"{row['lib']} {row['version']}".strip()
            for kind in ("error", "unsupported", "train_error"):
                if kind in row:
                    reasons.setdefault(row[kind], []).append(f"{name}, {_network(row)}")
            if "infer_ms" not in row:
                continue
            line = [_network(row), f"{row['voxels']:,}", name]
            for what, pattern in (
                ("infer_ms", ".3f"), ("kept_ms", ".3f"), ("gpu_ms", ".3f"), ("idle", ".0%"),
                ("kernels", "d"), ("infer_mib", ".0f"), ("train_ms", ".3f"), ("train_gpu_ms", ".3f"),
                ("train_idle", ".0%"), ("train_kernels", "d"), ("train_mib", ".0f"), ("rel_l2", ".1e"),
                ("rel_l2_fp32", ".1e"),
            ):  # fmt: skip
                line.append(number(row.get(what), pattern))
            line.insert(7, _in_a_row(row))
            apart = row["cells_missing"] or row["cells_more"]
            line[-2] += f", cells -{row['cells_missing']} +{row['cells_more']}" if apart else ""
            rows.append(line)
        header = [
            "network, scene", "voxels", "library", "infer ms", "maps kept", "GPU ms", "idle", "in a row",
            "kernels", "MiB", "train ms", "GPU ms", "idle", "kernels", "MiB", "rel-L2", "fp32",
        ]  # fmt: skip
        failed = _without_figures(result["networks"], reasons)
        blocks.append("\n\n".join([_networks_caption(result), markdown(header, rows), *failed]))
    return "\n\n".join(blocks) or "No run of `benchmarks/networks.py` has been recorded yet."


def _moves_table(moves: list[Result]) -> str:
    """Operations that only move data, and what their rooflines count."""
    rows, notes = [], {}
    for row in moves:
        mark = notes.setdefault(row["counted"], len(notes) + 1)
        rows.append(
            [
                f"{row['what']} ({mark})",
                f"{row['channels']} {row['dtype']}" if row["channels"] else "",
                number(row["floor_ms"], ".4f"),
                number(row.get("ms"), ".4f"),
                number(row["wall_ms"], ".3f"),
                number(row["waits"], "d"),
                number(row["over_floor"], ".2f"),
                number(row.get("backward_ms"), ".4f"),
                number(row.get("backward_over_floor"), ".2f"),
            ]
        )
    header = [
        "operation", "C", "roofline ms", "device ms", "wall ms", "waits for the GPU", "time / roofline",
        "backward ms", "time / roofline",
    ]  # fmt: skip
    said = " ".join(f"({mark}) {text}." for text, mark in notes.items())
    return f"{markdown(header, rows)}\n\nRooflines count, once each: {said}"
