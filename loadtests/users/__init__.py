"""Production traffic from the splitter's access log."""
