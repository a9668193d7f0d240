"""Tables, plots and the HTML page, made from reports."""
