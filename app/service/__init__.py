"""The ranking service without HTTP: admission, start and stop, health, reloads. HTTP sees it through `app.interface`."""
