"""Templates, style and script of the HTML report. Installed as `advisor.report_templates`."""
