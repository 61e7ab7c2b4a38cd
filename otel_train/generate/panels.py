"""The house style of dashboard panels, over grafana-foundation-sdk: the queries decide, the looks are the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from otel_train.generate.libraries import (
    PromQueryFormat,
    common,
    common_models,
    dashboard,
    dashboard_models,
    prometheus,
    stat,
    table,
    timeseries,
)
from otel_train.generate.promql import Matcher

DATA_SOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
RUN: tuple[Matcher, ...] = (("job=~", "$job"), ("run", "$run"))
"""What every query of a dashboard asks for."""
INTERVAL = "$__rate_interval"

Steps = Sequence[tuple[float | None, str]]
"""Where a colour begins; None: at the bottom."""


def query(expr: str, legend: str = "") -> prometheus.Dataquery:
    """Return a query over the dashboard's time range."""
    return prometheus.Dataquery().expr(expr).legend_format(legend or "__auto").range()


def rows(expr: str) -> prometheus.Dataquery:
    """Return a query for the rows of a table."""
    return prometheus.Dataquery().expr(expr).format(PromQueryFormat.TABLE).instant()


def number(title: str, why: str, expr: str, unit: str, *, decimals: int = 0, steps: Steps = ((None, "text"),)) -> stat.Panel:
    """Return a panel with the latest value in large type, over a small graph."""
    return (
        stat.Panel()
        .title(title)
        .description(why)
        .datasource(DATA_SOURCE)
        .with_target(query(expr).ref_id("A"))
        .unit(unit)
        .decimals(decimals)
        .thresholds(_thresholds(steps))
        .color_scheme(dashboard.FieldColor().mode(dashboard_models.FieldColorModeId.THRESHOLDS))
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .height(4)
        .span(4)
    )


def lines(title: str, why: str, unit: str, *queries: prometheus.Dataquery, width: int = 12) -> timeseries.Panel:
    """Return a graph over time."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(why)
        .datasource(DATA_SOURCE)
        .unit(unit)
        .line_width(1)
        .fill_opacity(0)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(legend(common_models.LegendPlacement.BOTTOM))
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(common_models.SortOrder.DESCENDING))
        .height(8)
        .span(width)
    )
    for index, one in enumerate(queries):
        panel.with_target(one.ref_id(chr(ord("A") + index)))
    return panel


def banded(panel: timeseries.Panel, steps: Steps) -> timeseries.Panel:
    """Colour the background of a graph by what is good."""
    style = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.AREA)
    return panel.thresholds(_thresholds(steps)).thresholds_style(style)


def logarithmic(panel: timeseries.Panel) -> timeseries.Panel:
    """Give a graph a logarithmic axis."""
    return panel.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10))


def legend(placement: common_models.LegendPlacement, *calculations: str) -> common.VizLegendOptions:
    """Return a legend; with calculations it is a table."""
    mode = common_models.LegendDisplayMode.TABLE if calculations else common_models.LegendDisplayMode.LIST
    return common.VizLegendOptions().display_mode(mode).placement(placement).show_legend(True).calcs(list(calculations))


def listing(title: str, why: str, *queries: prometheus.Dataquery, width: int = 12) -> table.Panel:
    """Return a table with a row a label set."""
    panel = table.Panel().title(title).description(why).datasource(DATA_SOURCE).height(8).span(width)
    for index, one in enumerate(queries):
        panel.with_target(one.ref_id(chr(ord("A") + index)))
    return panel.with_transformation(dashboard_models.DataTransformerConfig(id_val="merge", options={}))


def organised(panel: table.Panel, columns: dict[str, str], hidden: Sequence[str]) -> table.Panel:
    """Name and order a table's columns."""
    options: dict[str, Any] = {
        "renameByName": columns,
        "indexByName": {name: index for index, name in enumerate(columns)},
        "excludeByName": dict.fromkeys(hidden, True),
    }
    return panel.with_transformation(dashboard_models.DataTransformerConfig(id_val="organize", options=options))


def coloured(panel: table.Panel, column: str, steps: Steps, decimals: int) -> table.Panel:
    """Colour a table's column by its values."""
    thresholds = {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in steps]}
    values = {"thresholds": thresholds, "decimals": decimals, "custom.cellOptions": {"type": "color-text"}}
    return panel.override_by_name(
        column, [dashboard_models.DynamicConfigValue(id_val=key, value=value) for key, value in values.items()]
    )


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    listed = [dashboard_models.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(listed)
