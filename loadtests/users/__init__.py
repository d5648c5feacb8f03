"""The traffic of users, as the splitter's access log tells it: followed, written down as records, accounted for."""
