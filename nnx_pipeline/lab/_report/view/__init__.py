"""The rows and the sentences of a report, chosen once for terminal, page and chart."""
