"""Pictures of a trace, in a notebook, a browser, a terminal or a paper; never of live engine state.

`columns` makes a trace into what JavaScript draws (`static/timeline.js`); `timeline` is the widget,
`html` the page, `explorer` the knobs around it; `timeline_figure` and `figures` are still pictures.
"""
