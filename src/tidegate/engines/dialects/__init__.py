"""Streams of other shapes than OpenAI's chat/completions, one file each: which events are its own, and what they mean.

A file gives `begins(event) -> bool`, true for the events by which its streams begin, and a class `Reader(answer)` whose `read(event, data, at_ns)`
puts the chunks of one event into `answer.ready` and sets `answer.over` at the dialect's own last word. An event is a JSON object, already decoded;
`data` are its bytes. It raises TidegateError for the errors that an engine reports.
"""
