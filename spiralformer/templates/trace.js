for (const box of document.querySelectorAll('.diagram')) {
  const [told, slider] = [box.querySelector('.told'), box.querySelector('input')];
  const choose = (i) => {
    for (const token of box.querySelectorAll('.token')) {
      token.classList.toggle('on', token.dataset.i === i);
      if (token.dataset.i === i) told.textContent = token.querySelector('title').textContent;
    }
    if (slider) slider.value = i;
  };
  for (const token of box.querySelectorAll('.token'))
    for (const event of ['pointerenter', 'click'])
      token.querySelector('.column').addEventListener(event, () => choose(token.dataset.i));
  slider?.addEventListener('input', () => choose(slider.value));
  choose(box.querySelector('.token.on').dataset.i);
}
