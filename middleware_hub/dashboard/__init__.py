"""The dashboard: a page in the browser, and the routes of episodes and of the run that it reads.

page          routes for the page, its scripts and its style sheets
episodes      `/router/episodes` and `/router/run`
gathering     merges the answers of several router processes
tokens        the slice of an episode's tokens that the token view reads
hidden_texts  removes texts from episodes
assets/       the page, its views, its style sheet: ES modules that need no build step
vendor/       third-party libraries with their licences, unchanged
"""
